"""clients/python/tokenkeeper.py, with a real database and a daemon."""

import asyncio
import unittest
from datetime import datetime, timedelta, timezone
from uuid import UUID

import psycopg
import tokenkeeper
from psycopg.rows import dict_row
from stage import PROVIDER, TOPIC, ask, eventually, state, token

NOW = datetime.now(timezone.utc)


class Blocking(unittest.TestCase):
    def setUp(self):
        # A row factory of the application's own must not matter.
        self.connection = psycopg.connect(PROVIDER, autocommit=True, row_factory=dict_row)

    def tearDown(self):
        self.connection.close()

    def test_registering_and_logging_out(self):
        a = token("a1")
        self.assertIs(tokenkeeper.register(self.connection, a, TOPIC, device_id="d1", tags=["World"], user_id="u1"), True)
        row = "SELECT concat_ws(' ', device_id, user_id, tags) FROM tokenkeeper.token WHERE token = %s"
        self.assertEqual(ask(row, a), "d1 u1 {World}")
        tokenkeeper.register(self.connection, a, TOPIC, device_id="", user_id="")
        self.assertEqual(ask(row, a), "{World}", "'' clears, None keeps")
        self.assertIs(tokenkeeper.is_sendable(self.connection, a, TOPIC), True)
        tokenkeeper.unregister(self.connection, a, TOPIC)
        self.assertIs(tokenkeeper.is_sendable(self.connection, a, TOPIC), False)
        self.assertIs(tokenkeeper.is_sendable(self.connection, a, TOPIC, environment="sandbox"), True)
        with self.assertRaises(psycopg.errors.InvalidParameterValue):
            tokenkeeper.register(self.connection, "zz", TOPIC)

    def test_an_earlier_registration_does_not_revive(self):
        a = token("a2")
        tokenkeeper.unregister(self.connection, a, TOPIC, at=NOW)
        self.assertIs(tokenkeeper.register(self.connection, a, TOPIC, registered_at=NOW - timedelta(days=1)), False)

    def test_the_gate_keeps_order_spelling_and_duplicates(self):
        tokenkeeper.unregister(self.connection, token("a3"), TOPIC)
        asked = [token("c3").upper(), token("a3"), "not hex", token("b3"), token("b3")]
        answer = tokenkeeper.sendable(self.connection, iter(asked), TOPIC)
        self.assertEqual(answer, [asked[0], asked[3], asked[4]])
        self.assertEqual(tokenkeeper.sendable(self.connection, [], TOPIC), [])

    def test_reports_of_any_type_count(self):
        at = NOW - timedelta(minutes=1)
        milliseconds = int(at.timestamp() * 1000)
        kinds = [(410, milliseconds), ("410", str(milliseconds)), (410, at)]
        for number, (status, timestamp) in enumerate(kinds):
            tokenkeeper.report(self.connection, TOPIC, token(f"e{number}"), status, "Unregistered", timestamp, sent_at=at)
        tokenkeeper.report(self.connection, TOPIC, token("e9"), 400, "BadDeviceToken", sent_at=at, apns_id="x")
        tokenkeeper.report(self.connection, TOPIC, token("e8"), "failed", "TimeoutError")
        for number in range(len(kinds)):
            eventually("a 410 suppresses", lambda: state(token(f"e{number}")) == "stale")
            stale_at = "SELECT extract(epoch FROM invalidated_at) * 1000 FROM tokenkeeper.token WHERE token = %s"
            self.assertAlmostEqual(float(ask(stale_at, token(f"e{number}"))), milliseconds, delta=1)
        eventually("a 400 makes suspect", lambda: state(token("e9")) == "suspect")
        eventually("what is no status is rejected", lambda: rejected("send", token("e8")) == "status")

    def test_results_by_copy(self):
        body = '{"reason":"Unregistered","timestamp":%d}' % (NOW.timestamp() * 1000)
        rows = [{"topic": TOPIC, "token": token(f"f{n}"), "status": 410, "body": body, "sent_at": NOW} for n in range(300)]
        self.assertEqual(tokenkeeper.copy_results(self.connection, iter(rows)), 300)
        eventually("all are recorded", lambda: tokenkeeper.sendable(self.connection, [r["token"] for r in rows], TOPIC) == [])

    def test_registrations_by_copy(self):
        rows = [
            {"topic": TOPIC, "token": token(f"b{n:03}b"), "registered_at": NOW, "device_id": f"c{n}", "tags": ["World", "a,b"]}
            for n in range(300)
        ]
        rows.append({"topic": TOPIC, "token": token("bbbb"), "registered_at": NOW, "unregistered": True})
        rows.append({"topic": TOPIC, "token": "not hex"})
        self.assertEqual(tokenkeeper.copy_registrations(self.connection, iter(rows)), 302)
        count = "SELECT count(*) FROM tokenkeeper.token WHERE device_id ~ '^c' AND tags = '{World,\"a,b\"}' AND state = 'active'"
        eventually("all are applied", lambda: ask(count) == 300 and state(token("bbbb")) == "unregistered_by_app")
        eventually("a malformed token is rejected", lambda: rejected("registration", "not hex") == "token")

    def test_values_as_applications_have_them(self):
        a, b = token("d1"), token("d2")
        tokenkeeper.register(self.connection, a, TOPIC, device_id=UUID(int=7), user_id=42, tags="World")
        row = {"topic": TOPIC, "token": b, "device_id": UUID(int=8), "user_id": 42, "tags": "World"}
        nul, surrogate = {"topic": TOPIC, "token": "nul\0"}, {"topic": TOPIC, "token": "half\ud800"}
        self.assertEqual(tokenkeeper.copy_registrations(self.connection, [row, nul, surrogate]), 3)
        both = "SELECT count(*) FROM tokenkeeper.token WHERE user_id = '42' AND tags = '{World}' AND device_id LIKE '00000000-%%'"
        eventually("both are registered", lambda: ask(both + " AND token IN (%s, %s)", a, b) == 2)
        eventually("the others are rejected", lambda: rejected("registration", "nul\ufffd") and rejected("registration", "half?"))
        body = b'{"reason":"Unregistered","timestamp":%d}' % ((NOW + timedelta(minutes=1)).timestamp() * 1000)
        tokenkeeper.copy_results(self.connection, [{"topic": TOPIC, "token": a, "status": 410, "body": body}])
        eventually("a body of bytes is read", lambda: state(a) == "stale")

    def test_mistakes_of_the_caller_are_refused(self):
        naive = datetime(2026, 11, 6)
        self.assertRaises(TypeError, lambda: tokenkeeper.sendable(self.connection, token("a1"), TOPIC))
        for call in (
            lambda: tokenkeeper.report(self.connection, TOPIC, token("a1"), 410, "Unregistered", naive),
            lambda: tokenkeeper.report(self.connection, TOPIC, token("a1"), 400, sent_at=naive),
            lambda: tokenkeeper.copy_results(self.connection, [{"topic": TOPIC, "sent_at": naive}]),
            lambda: tokenkeeper.copy_results(self.connection, [{"topic": TOPIC, "code": 410}]),
        ):
            self.assertRaises(ValueError, call)
        self.assertIs(tokenkeeper.is_sendable(self.connection, token("a9"), TOPIC), True, "the connection is still usable")


class Asynchronous(unittest.IsolatedAsyncioTestCase):
    async def test_everything_that_blocks_can_be_awaited(self):
        async with await psycopg.AsyncConnection.connect(PROVIDER, autocommit=True, row_factory=dict_row) as connection:
            a = token("ad")
            self.assertIs(await tokenkeeper.register(connection, a, TOPIC, registered_at=NOW - timedelta(hours=1)), True)
            self.assertEqual(await tokenkeeper.sendable(connection, [a], TOPIC), [a])
            await tokenkeeper.report(connection, TOPIC, a, 410, "Unregistered", int(NOW.timestamp() * 1000), sent_at=NOW)
            await asyncio.to_thread(eventually, "it is stale", lambda: state(a) == "stale")
            self.assertIs(await tokenkeeper.is_sendable(connection, a, TOPIC), False)
            self.assertEqual(await tokenkeeper.copy_registrations(connection, [{"topic": TOPIC, "token": a}]), 1)
            await asyncio.to_thread(eventually, "it is back", lambda: state(a) == "active")
            await tokenkeeper.unregister(connection, a, TOPIC)
            self.assertIs(await tokenkeeper.is_sendable(connection, a, TOPIC), False)


def rejected(queue, token):
    """The first word of the error, if the row was rejected."""
    table = "rejected_result" if queue == "send" else "rejected_registration"
    error = ask(f"SELECT max(error) FROM tokenkeeper.{table} WHERE token = %s", token)
    return error and error.split()[0]


if __name__ == "__main__":
    unittest.main()
