"""clients/python/tokenkeeper_aioapns.py, with the real aioapns and the fake APNs."""

import asyncio
import contextlib
import importlib.metadata
import os
import unittest
import unittest.mock

import aioapns
import psycopg
import tokenkeeper
from stage import PROVIDER, TOPIC, ask, eventually, redirect, state, token
from tokenkeeper_aioapns import FAILED, WITHHELD, GatedAPNs

redirect()


@contextlib.asynccontextmanager
async def connect():
    async with await psycopg.AsyncConnection.connect(PROVIDER) as connection:
        yield connection


def client(use_sandbox=False):
    # aioapns 4 takes the key itself, earlier versions its path.
    key = os.environ["APNS_KEY"]
    if importlib.metadata.version("aioapns").startswith("4"):
        with open(key) as file:
            key = file.read()
    return aioapns.APNs(
        key=key, key_id=os.environ["APNS_KEY_ID"], team_id=os.environ["APNS_TEAM_ID"], topic=TOPIC, use_sandbox=use_sandbox
    )


def request(name, **options):
    return aioapns.NotificationRequest(
        device_token=token(name), message={"aps": {"alert": "Hello"}}, push_type=aioapns.PushType.ALERT, **options
    )


class Gated(unittest.IsolatedAsyncioTestCase):
    async def test_only_what_the_gate_lets_pass_is_sent_and_each_answer_is_reported(self):
        print("aioapns", importlib.metadata.version("aioapns"), flush=True)
        async with connect() as connection:
            await tokenkeeper.unregister(connection, token("a1"), TOPIC)
        apns = GatedAPNs(client(), connect, batch=20)
        # More than one batch; one request at first, because this server allows one stream until it has seen a valid token.
        names = ["dead01", "a1", "bad001"] + [f"b{number}" for number in range(60)]
        results = await apns.send_notifications(request(name) for name in names)
        self.assertEqual([result.status for result in results], ["410", WITHHELD, "400"] + ["200"] * 60)
        self.assertFalse(results[1].is_successful)
        await asyncio.to_thread(eventually, "the 410 counts", lambda: state(token("dead01")) == "stale")
        await asyncio.to_thread(eventually, "the 400 counts", lambda: state(token("bad001")) == "suspect")
        accepted = "SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 200"
        await asyncio.to_thread(eventually, "the 200s are counted", lambda: ask(accepted) == 60)
        again = await apns.send_notifications([request("dead01"), request("bad001"), request("b1")])
        self.assertEqual([result.status for result in again], [WITHHELD, WITHHELD, "200"])

    async def test_topic_and_environment_are_those_of_the_request_and_the_client(self):
        apns = GatedAPNs(client(use_sandbox=True), connect)
        result = await apns.send_notification(request("dead02", apns_topic=TOPIC + ".voip"))
        self.assertEqual(result.status, "410")
        where = "SELECT max(environment || ' ' || topic) FROM tokenkeeper.token WHERE token = %s"
        await asyncio.to_thread(eventually, "it counts", lambda: ask(where, token("dead02")) == "sandbox com.example.app.voip")
        self.assertEqual((await apns.send_notification(request("dead02"))).status, "410", "another topic is another token")

    async def test_what_was_answered_is_reported_when_the_sender_is_cancelled(self):
        apns = GatedAPNs(client(), connect)
        unanswered = request("fff3")
        task = asyncio.create_task(apns.send_notifications([request("dead03"), unanswered]))
        while not any(unanswered.notification_id in c.requests for c in apns.apns.pool.connections):
            await asyncio.sleep(0.01)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(eventually, "the 410 counts", lambda: state(token("dead03")) == "stale")

    async def test_without_an_answer_nothing_is_reported(self):
        apns = GatedAPNs(client(), connect)
        apns.apns.pool.max_connection_attempts = 1
        # Nobody listens there.
        with unittest.mock.patch.object(aioapns.connection.APNsProductionClientProtocol, "APNS_PORT", 1):
            result = await apns.send_notification(request("b9"))
        self.assertEqual((result.status, result.is_successful), (FAILED, False))
        self.assertEqual(ask("SELECT count(*) FROM tokenkeeper.rejected_result"), 0)

    async def test_an_error_while_reporting_does_not_hide_what_was_sent(self):
        calls = []

        @contextlib.asynccontextmanager
        async def connect_once():
            calls.append(1)
            if len(calls) > 1:
                raise psycopg.OperationalError("the server is gone")
            async with connect() as connection:
                yield connection

        with self.assertLogs("tokenkeeper", "ERROR"):
            result = await GatedAPNs(client(), connect_once).send_notification(request("b8"))
        self.assertEqual(result.status, "200")


if __name__ == "__main__":
    unittest.main()
