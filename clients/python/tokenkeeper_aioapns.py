"""tokenkeeperd for aioapns: ask the gate before each push, and report what APNs answered.

Copy this file and tokenkeeper.py into your project, and wrap the `APNs` that you have (aioapns 3.1 to 4.0):

    pool = psycopg_pool.AsyncConnectionPool("dbname=push user=my_sender")
    apns = GatedAPNs(aioapns.APNs(key=key, key_id=key_id, team_id=team_id, topic="com.example.app"), pool.connection)
    results = await apns.send_notifications(requests)

The login needs the role tokenkeeper_sender. The topic of a request and the environment of the client decide about which token of the
ledger the gate is asked. Nothing else needs configuration.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timezone
from typing import Any

import tokenkeeper
from aioapns import APNs, NotificationRequest
from aioapns.common import NotificationResult
from aioapns.connection import APNsDevelopmentClientProtocol
from psycopg import AsyncConnection

WITHHELD = "withheld"
"""The status of a request that was not sent: the gate withholds its token, or the token is malformed."""
FAILED = "failed"
"""The status of a request to which APNs did not respond. It may have been delivered."""

logger = logging.getLogger("tokenkeeper")


class GatedAPNs:
    """An aioapns client behind the gate."""

    def __init__(
        self,
        apns: APNs,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]],
        *,
        at_once: int = 500,
        batch: int = 1000,
    ) -> None:
        """`connect` gives a connection for one transaction, and commits it, as `pool.connection` does.

        At most `at_once` requests are in flight. The gate is asked, and results are reported, for `batch` requests at a time: what
        was sent in an unfinished batch is not reported if the process dies.
        """
        self.apns = apns
        self.connect = connect
        self.batch = batch
        self.limit = asyncio.Semaphore(at_once)
        is_sandbox = issubclass(apns.pool.protocol_class, APNsDevelopmentClientProtocol)
        self.environment = "sandbox" if is_sandbox else "production"

    async def send_notification(self, request: NotificationRequest) -> NotificationResult:
        """Send one notification, unless its token is withheld. `is_successful` of the result is then false, and `status` WITHHELD."""
        return (await self.send_notifications([request]))[0]

    async def send_notifications(self, requests: Iterable[NotificationRequest]) -> list[NotificationResult]:
        """Send notifications, and return their results in the same order.

        An error of the database before a batch is raised, and the batch is not sent. An error while results are reported is logged:
        the pushes were sent.
        """
        requests = list(requests)
        results: list[NotificationResult] = []
        for start in range(0, len(requests), self.batch):
            results += await self._send_batch(requests[start : start + self.batch])
        return results

    async def _send_batch(self, requests: Sequence[NotificationRequest]) -> list[NotificationResult]:
        passed = await self._passed(requests)
        rows: list[dict[str, Any]] = []
        try:
            # The first one goes alone: APNs allows a connection one stream until it has seen a valid provider token, and aioapns would
            # wait forever for the streams beyond.
            first = await self._send(requests[0], passed, rows)
            return [first, *await asyncio.gather(*(self._send(request, passed, rows) for request in requests[1:]))]
        finally:
            # Also when the caller was cancelled: what APNs has answered so far counts.
            await asyncio.shield(self._report(rows))

    async def _passed(self, requests: Sequence[NotificationRequest]) -> set[tuple[str, str]]:
        """The topic and token of the requests that may be sent."""
        tokens: dict[str, list[str]] = {}
        for request in requests:
            tokens.setdefault(self._topic(request), []).append(request.device_token)
        async with self.connect() as connection:
            return {
                (topic, token)
                for topic, asked in tokens.items()
                for token in await tokenkeeper.sendable(connection, asked, topic, environment=self.environment)
            }

    async def _send(
        self, request: NotificationRequest, passed: set[tuple[str, str]], rows: list[dict[str, Any]]
    ) -> NotificationResult:
        topic = self._topic(request)
        if (topic, request.device_token) not in passed:
            return NotificationResult(request.notification_id, WITHHELD, "withheld by tokenkeeper")
        async with self.limit:
            sent_at = datetime.now(timezone.utc)
            try:
                result = await self.apns.send_notification(request)
            except Exception as error:  # A library's error, or one of the network: APNs has not answered.
                return NotificationResult(request.notification_id, FAILED, f"{type(error).__name__}: {error}")
        # aioapns has parsed the body and kept its reason and timestamp.
        body = {"reason": result.description, "timestamp": result.timestamp}
        body = {key: value for key, value in body.items() if value is not None}
        rows.append({
            "topic": topic, "token": request.device_token, "status": result.status, "sent_at": sent_at,
            "body": json.dumps(body) if body else None, "apns_id": result.notification_id, "environment": self.environment,
        })  # fmt: skip
        return result

    async def _report(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        try:
            async with self.connect() as connection:
                await tokenkeeper.copy_results(connection, rows)
        except Exception:
            logger.exception("%d results of APNs could not be reported", len(rows))

    def _topic(self, request: NotificationRequest) -> str:
        return getattr(request, "apns_topic", None) or self.apns.pool.apns_topic
