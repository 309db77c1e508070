"""tokenkeeperd for psycopg 3: register device tokens, ask the gate, report what APNs answered.

Copy this file into your project. Each function takes a connection first and works in its transaction: commit as usual. With a
`psycopg.AsyncConnection`, await the result.

    with psycopg.connect("dbname=push") as connection:
        tokenkeeper.register(connection, token, "com.example.app", device_id=installation)

    async with pool.connection() as connection:
        tokens = await tokenkeeper.sendable(connection, tokens, "com.example.app")

The login needs the role tokenkeeper_app to register, and tokenkeeper_sender to ask and to report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

REGISTRATION = ("topic", "token", "registered_at", "device_id", "user_id", "tags", "unregistered", "environment")
RESULT = ("topic", "token", "status", "body", "sent_at", "apns_id", "environment")


def register(
    connection: Any, token: str, topic: str, *, environment: str = "production", registered_at: datetime | None = None,
    device_id: str | UUID | int | None = None, tags: Sequence[str] | None = None, user_id: str | UUID | int | None = None,
) -> Any:  # fmt: skip
    """Record that the app has registered, at each of its launches. Return whether the token may be sent to now.

    `registered_at` is now by default. None keeps the device, the user and the tags that are stored; '' clears the device or the user.
    A malformed token raises `psycopg.errors.InvalidParameterValue`.
    """
    return _call(
        connection,
        "SELECT tokenkeeper.register(%s, %s, %s, coalesce(%s, clock_timestamp()), "
        "device_id => %s::text, tags => %s, user_id => %s::text)",
        (token, topic, environment, _instant(registered_at), device_id, _tags(tags), user_id),
    )


def unregister(connection: Any, token: str, topic: str, *, environment: str = "production", at: datetime | None = None) -> Any:
    """The user has logged out: suppress the token until it is registered again. `at` is now by default."""
    statement = "SELECT tokenkeeper.unregister(%s, %s, %s, coalesce(%s, clock_timestamp()))"
    return _call(connection, statement, (token, topic, environment, _instant(at)))


def is_sendable(connection: Any, token: str, topic: str, *, environment: str = "production") -> Any:
    """Return whether the gate lets a push to this token pass."""
    return _call(connection, "SELECT tokenkeeper.is_sendable(%s, %s, %s)", (token, topic, environment))


def sendable(connection: Any, tokens: Iterable[str], topic: str, *, environment: str = "production") -> Any:
    """Return the tokens that may be sent to, as a list, in the order and spelling given."""
    if isinstance(tokens, str):
        raise TypeError("tokens is one text, expected a list of them")
    statement = """
        SELECT coalesce(array_agg(s.token ORDER BY s.place), '{}')
        FROM tokenkeeper.sendable(%s::text[], %s, %s) WITH ORDINALITY AS s (token, place)"""
    return _call(connection, statement, (list(tokens), topic, environment))


def report(
    connection: Any, topic: str, token: str, status: int | str, reason: str | None = None,
    timestamp: int | str | datetime | None = None, *, sent_at: datetime | None = None, apns_id: str | None = None,
    environment: str = "production",
) -> Any:  # fmt: skip
    """Report one response of APNs, if your library returns the reason and the timestamp (in milliseconds) instead of the body.

    `sent_at` is when the request was started; without it, five minutes ago are assumed."""
    at = _instant(timestamp).isoformat() if isinstance(timestamp, datetime) else None if timestamp is None else str(timestamp)
    return _call(
        connection,
        "SELECT tokenkeeper.report(%s::text, %s::text, %s::text, %s::text, %s::text, %s, %s, %s)",
        (topic, token, str(status), reason, at, _instant(sent_at), apns_id, environment),
    )


def copy_registrations(connection: Any, rows: Iterable[Mapping[str, Any]]) -> Any:
    """Queue many registrations or logouts by COPY; return how many. The daemon applies them within seconds.

    A row is a mapping with some of the keys REGISTRATION. A wrong token, topic or other text never raises an error: the row goes to
    rejected_registration. A `registered_at` that is no instant, or an `unregistered` that is no boolean, does, and no row is queued.
    """
    return _copy(connection, "registration", REGISTRATION, rows)


def copy_results(connection: Any, rows: Iterable[Mapping[str, Any]]) -> Any:
    """Queue many responses of APNs by COPY; return how many. A row is a mapping with some of the keys RESULT."""
    return _copy(connection, "send_result", RESULT, rows)


def _instant(moment: datetime | None) -> Any:
    if moment is not None and moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone: PostgreSQL would take it for the session's")
    return moment


def _call(connection: Any, statement: str, values: Sequence[Any]) -> Any:
    if isinstance(connection, psycopg.AsyncConnection):
        return _call_async(connection, statement, values)
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(statement, values).fetchone()[0]


async def _call_async(connection: psycopg.AsyncConnection[Any], statement: str, values: Sequence[Any]) -> Any:
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        return (await (await cursor.execute(statement, values)).fetchone())[0]


def _row(columns: Sequence[str], row: Mapping[str, Any]) -> list[Any]:
    unknown = row.keys() - set(columns)
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}, expected some of {columns}")
    return [_tags(row.get(column)) if column == "tags" else _value(row.get(column)) for column in columns]


def _value(value: Any) -> Any:
    # A body as it came from the network. COPY would write a UUID without its hyphens.
    value = value.decode(errors="replace") if isinstance(value, bytes) else str(value) if isinstance(value, UUID) else value
    if isinstance(value, str):  # PostgreSQL takes no NUL and no surrogate. Replaced, they fail one row, and not the whole COPY.
        return value.replace("\0", "\ufffd").encode(errors="replace").decode()
    return _instant(value) if isinstance(value, datetime) else value


def _tags(tags: Sequence[str] | str | None) -> list[Any] | None:
    return None if tags is None else [_value(tag) for tag in ([tags] if isinstance(tags, str) else tags)]


def _copy(connection: Any, table: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Any:
    statement = f"COPY tokenkeeper.{table} ({', '.join(columns)}) FROM STDIN"
    if isinstance(connection, psycopg.AsyncConnection):
        return _copy_async(connection, statement, columns, rows)
    with psycopg.Cursor(connection) as cursor:
        with cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(_row(columns, row))
        return cursor.rowcount


async def _copy_async(connection: Any, statement: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> int:
    async with psycopg.AsyncCursor(connection) as cursor:
        async with cursor.copy(statement) as copy:
            for row in rows:
                await copy.write_row(_row(columns, row))
        return cursor.rowcount
