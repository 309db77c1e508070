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
        topic = TOPIC + ".many"  # Of this test alone.
        async with connect() as connection:
            await tokenkeeper.unregister(connection, token("a1"), topic)
        apns = GatedAPNs(client(), connect, batch=20)
        # More than one batch; one request at first, because this server allows one stream until it has seen a valid token.
        names = ["dead01", "a1", "bad001"] + [f"b{number}" for number in range(60)]
        results = await apns.send_notifications(request(name, apns_topic=topic) for name in names)
        self.assertEqual([result.status for result in results], ["410", WITHHELD, "400"] + ["200"] * 60)
        self.assertFalse(results[1].is_successful)
        await asyncio.to_thread(eventually, "the 410 counts", lambda: state(token("dead01")) == "stale")
        await asyncio.to_thread(eventually, "the 400 counts", lambda: state(token("bad001")) == "suspect")
        accepted = "SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 200 AND topic = %s"
        await asyncio.to_thread(eventually, "the 200s are counted", lambda: ask(accepted, topic) == 60)
        again = await apns.send_notifications([request(name, apns_topic=topic) for name in ("dead01", "bad001", "b1")])
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

    async def test_what_could_not_be_reported_is_kept_and_reported_later(self):
        apns = GatedAPNs(client(), (database := Away()).connect)
        with self.assertLogs("tokenkeeper", "ERROR"):
            database.away_after = 1  # The gate still answers.
            result = await apns.send_notification(request("dead05"))
        self.assertEqual(result.status, "410")
        with self.assertRaises(psycopg.OperationalError):
            await apns.report()
        with self.assertRaises(psycopg.OperationalError):
            await apns.send_notification(request("b8"))
        self.assertIsNone(state(token("dead05")))
        database.away_after = None
        await asyncio.to_thread(eventually, "the 410 counts, without a further push", lambda: state(token("dead05")) == "stale")

    async def test_one_request_without_an_answer_does_not_keep_the_others_from_being_reported(self):
        apns = GatedAPNs(client(), connect, timeout=8)  # Enough for an answer on a busy machine, and waited for once.
        results = await apns.send_notifications([request("dead06"), request("fff6"), request("b6")])
        self.assertEqual([result.status for result in results], ["410", FAILED, "200"])
        await asyncio.to_thread(eventually, "the 410 counts", lambda: state(token("dead06")) == "stale")
        self.assertEqual((await apns.send_notification(request("b7"))).status, "200", "the connection still works")

    async def test_an_answer_after_the_time_is_reported(self):
        apns = GatedAPNs(client(), connect, timeout=0.05)
        send = apns.apns.pool.send_notification
        may_end = asyncio.Event()

        async def slowly(request):
            result = await send(request)
            await may_end.wait()
            return result

        apns.apns.pool.send_notification = slowly
        self.assertEqual((await apns.send_notification(request("dead07"))).status, FAILED)
        may_end.set()
        await asyncio.to_thread(eventually, "the 410 counts", lambda: state(token("dead07")) == "stale")

    async def test_an_error_of_err_func_does_not_hide_what_apns_has_answered(self):
        apns = GatedAPNs(client(), connect)
        apns.apns.err_func = unittest.mock.AsyncMock(side_effect=RuntimeError("mail server"))
        with self.assertLogs("tokenkeeper", "ERROR"):
            self.assertEqual((await apns.send_notification(request("dead08"))).status, "410")
        apns.apns.err_func.assert_awaited_once()
        await asyncio.to_thread(eventually, "the 410 counts", lambda: state(token("dead08")) == "stale")


class Away:
    """A database that is away after some connections."""

    away_after = None

    @contextlib.asynccontextmanager
    async def connect(self):
        if self.away_after == 0:
            raise psycopg.OperationalError("the server is gone")
        if self.away_after:
            self.away_after -= 1
        async with connect() as connection:
            yield connection


if __name__ == "__main__":
    unittest.main()
