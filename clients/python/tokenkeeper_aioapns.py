"""tokenkeeperd for aioapns: ask the gate before each push, and report what APNs answered.

Copy this file and tokenkeeper.py into your project, and wrap the `APNs` that you have (aioapns 3.1 to 4.0):

    pool = psycopg_pool.AsyncConnectionPool("dbname=push user=my_sender")
    apns = GatedAPNs(aioapns.APNs(key=key, key_id=key_id, team_id=team_id, topic="com.example.app"), pool.connection)
    results = await apns.send_notifications(requests)
    await apns.report()  # Before the process ends: if the database was away, some answers are not reported yet.

The login needs the role tokenkeeper_sender. Topic and environment are those of the request and of the client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timezone
from typing import Any

import tokenkeeper
from aioapns import APNs, NotificationRequest
from aioapns.common import NotificationResult
from aioapns.connection import APNsDevelopmentClientProtocol
from psycopg import AsyncConnection

WITHHELD = "withheld"  # The status of a request that was not sent: the gate withholds its token, or the token is malformed.
FAILED = "failed"  # The status of a request to which APNs has not responded. It may have been delivered.

logger = logging.getLogger("tokenkeeper")


class GatedAPNs:
    """An aioapns client behind the gate."""

    def __init__(
        self, apns: APNs, connect: Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]], *,
        at_once: int = 500, batch: int = 1000, timeout: float = 60,
    ) -> None:  # fmt: skip
        """`connect` gives a connection for one transaction, and commits it, as `pool.connection` does. An answer is awaited for `timeout`
        seconds. At most `at_once` requests are in flight. The gate is asked, and answers are reported, for `batch` requests at a time: those
        of an unfinished batch are lost if the process dies."""
        self.apns = apns
        self.connect = connect
        self.batch = batch
        self.timeout = timeout
        self.limit = asyncio.Semaphore(at_once)
        self.environment = "sandbox" if issubclass(apns.pool.protocol_class, APNsDevelopmentClientProtocol) else "production"
        self._answers: list[dict[str, Any]] = []  # What is not reported yet.
        self._reporting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself does not keep them alive.

    async def send_notification(self, request: NotificationRequest) -> NotificationResult:
        """Send one notification, unless its token is withheld. `is_successful` of the result is then false, and `status` WITHHELD."""
        return (await self.send_notifications([request]))[0]

    async def send_notifications(self, requests: Iterable[NotificationRequest]) -> list[NotificationResult]:
        """Send notifications, and return their results in the same order.

        An error of the database is raised if it comes before a batch, which is then not sent. Otherwise the answers are reported later.
        """
        requests = list(requests)
        batches = [requests[start : start + self.batch] for start in range(0, len(requests), self.batch)]
        return [result for batch in batches for result in await self._send_batch(batch)]

    async def report(self) -> None:
        """Report the answers that are not reported yet. An error of the database is raised, and they are kept."""
        async with self._reporting:
            while rows := self._answers[: self.batch]:
                async with self.connect() as connection:
                    await tokenkeeper.copy_results(connection, rows)
                del self._answers[: len(rows)]

    async def _send_batch(self, requests: Sequence[NotificationRequest]) -> list[NotificationResult]:
        await self.report()
        passed = await self._passed(requests)
        results = [NotificationResult(r.notification_id, WITHHELD, "withheld by tokenkeeper") for r in requests]
        sent = [place for place, r in enumerate(requests) if (self._topic(r), r.device_token) in passed]
        try:
            # The first one goes alone: APNs allows a connection one stream until it has seen a valid provider token, and aioapns would
            # wait forever for the streams beyond.
            for part in (sent[:1], sent[1:]):
                for place, result in zip(part, await asyncio.gather(*(self._send(requests[place]) for place in part))):
                    results[place] = result
        finally:
            # Also when the caller was cancelled: what APNs has answered so far counts. Nobody waits long for the database.
            await asyncio.wait([self._task(self._report_until_done())], timeout=5)
        return results

    async def _passed(self, requests: Sequence[NotificationRequest]) -> set[tuple[str, str]]:
        tokens: dict[str, list[str]] = {}
        for request in requests:
            tokens.setdefault(self._topic(request), []).append(request.device_token)
        async with self.connect() as connection:
            return {
                (topic, token)
                for topic, asked in tokens.items()
                for token in await tokenkeeper.sendable(connection, asked, topic, environment=self.environment)
            }

    async def _send(self, request: NotificationRequest) -> NotificationResult:
        async with self.limit:
            # It goes on when nobody waits any more: aioapns breaks its connection if a request is cancelled, and a late answer counts.
            answer = self._task(self._answer(request))
            try:
                return await asyncio.wait_for(asyncio.shield(answer), self.timeout)
            except asyncio.TimeoutError:
                return NotificationResult(request.notification_id, FAILED, f"no answer within {self.timeout} seconds")
            finally:
                if not answer.done():
                    answer.add_done_callback(lambda late: late.cancelled() or self._task(self._report_until_done()))

    async def _answer(self, request: NotificationRequest) -> NotificationResult:
        sent_at = datetime.now(timezone.utc)
        try:  # Not of the client but of its pool: an error of `err_func` must not hide what APNs has answered.
            result = await self.apns.pool.send_notification(request)
        except Exception as error:  # A library's error, or one of the network: APNs has not answered.
            return NotificationResult(request.notification_id, FAILED, f"{type(error).__name__}: {error}")
        body = {key: value for key, value in (("reason", result.description), ("timestamp", result.timestamp)) if value is not None}
        self._answers.append({
            "topic": self._topic(request), "token": request.device_token, "status": result.status, "sent_at": sent_at,
            "body": json.dumps(body) if body else None, "apns_id": result.notification_id, "environment": self.environment,
        })  # fmt: skip
        if self.apns.err_func and not result.is_successful:
            try:
                await self.apns.err_func(request, result)
            except Exception:
                logger.exception("err_func failed")
        return result

    async def _report_until_done(self) -> None:
        for pause in itertools.chain((1, 2, 4, 8, 16, 32), itertools.repeat(60)):
            try:
                return await self.report()
            except Exception:
                logger.exception("%d results of APNs could not be reported yet", len(self._answers))
            await asyncio.sleep(pause)

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _topic(self, request: NotificationRequest) -> str:
        return getattr(request, "apns_topic", None) or self.apns.pool.apns_topic
