"""tokenkeeperd for django-push-notifications 3.3: gate, reports and registrations for its APNs devices.

Copy this file next to manage.py, and add it to the settings. `send_message` then asks the gate, and reports what APNs answered.

    INSTALLED_APPS = [..., "push_notifications", "tokenkeeper_push.TokenkeeperPush"]
    TOKENKEEPER_DATABASE = "default"    # The alias in DATABASES: this is the default.

The library no longer deactivates devices: it ignores the timestamp of a 410, and a sender in the wrong environment would deactivate all.
Its REST views register a device with tokenkeeperd at each launch of the app; call `tokenkeeper_push.register(device)` in your own views.
The login needs the roles tokenkeeper_app and tokenkeeper_sender. What APNs answered is reported on a connection of its own, so that it
counts even if your transaction is rolled back. If the database is away, it is kept in memory until the next push or the process's end.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections import deque
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module, util
from types import SimpleNamespace
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, transaction
from push_notifications.conf import get_manager

WITHHELD = "Withheld"  # The result of a token that was not sent to: the gate withholds it, or it is malformed.
# Each registration_id, with the token as APNs takes it (many tables have it as <abcd ef01>); null if it may not be sent to.
GATE = """
    WITH given AS (SELECT g.stored, tokenkeeper.parse_token(g.stored) AS token FROM unnest(%s::text[]) AS g (stored))
    SELECT g.stored, s.token
    FROM given AS g LEFT JOIN tokenkeeper.sendable(ARRAY(SELECT DISTINCT token FROM given), %s, %s) AS s (token) USING (token)"""

ALIAS = getattr(settings, "TOKENKEEPER_DATABASE", "default")
logger = logging.getLogger("tokenkeeper")
_unreported: deque[tuple[Any, ...]] = deque(maxlen=100_000)  # What could not be reported yet.


class TokenkeeperPush(AppConfig):
    name = "tokenkeeper_push"

    def ready(self) -> None:
        try:
            from push_notifications import apns_async

            devices = apns_async.models.APNSDevice.objects
            apns_async._create_client = _noting(apns_async._create_client)
            apns_async.apns_send_bulk_message = _gated(apns_async.apns_send_bulk_message)
        except (ImportError, AttributeError) as error:
            raise ImproperlyConfigured(f"tokenkeeper_push needs django-push-notifications 3.3 with aioapns: {error}") from error
        # The library uses this name only to deactivate the devices of the tokens that APNs rejects.
        apns_async.models = SimpleNamespace(APNSDevice=SimpleNamespace(objects=SimpleNamespace(filter=lambda **_: devices.none())))
        with suppress(ImportError):  # For code that calls the library's older way, by apns2, which has neither gate nor reports.
            import_module("push_notifications.apns").models = apns_async.models
        atexit.register(report)
        if util.find_spec("rest_framework"):
            Views = import_module("push_notifications.api.rest_framework").DeviceViewSetMixin
            Views.perform_create = _registering(Views.perform_create)
            Views.perform_update = _registering(Views.perform_update)


def register(device: Any) -> bool:
    """Tell tokenkeeperd that the app of this APNSDevice has registered now: at each launch. Return whether its token may be sent to."""
    scope = _scope(device.application_id)
    token = _query("SELECT coalesce(tokenkeeper.parse_token(%s), %s)", [device.registration_id, device.registration_id])[0][0]
    if not device.active:  # A logout.
        _query("SELECT tokenkeeper.unregister(%s, %s, %s)", [token, *scope])
        return False
    names = [device.device_id and str(device.device_id), "" if device.user_id is None else str(device.user_id)]
    return _query("SELECT tokenkeeper.register(%s, %s, %s, device_id => %s, user_id => %s)", [token, *scope, *names])[0][0]


def report() -> None:
    """Report what APNs has answered and is not reported yet. It is done before and after each push, and when the process ends."""
    answers: list[tuple[Any, ...]] = []
    with suppress(IndexError):
        while True:
            answers.append(_unreported.popleft())
    connection = connections[ALIAS].copy()
    try:
        if answers:
            connection.cursor().executemany("SELECT tokenkeeper.report(%s, %s, %s, %s, %s, %s, %s, %s)", answers)
    except Exception:  # The pushes were sent: an error here would have the caller send them again.
        _unreported.extend(answers)
        logger.exception("%d results of APNs could not be reported yet", len(answers))
    finally:
        connection.close()


def _gated(send: Any) -> Any:
    @functools.wraps(send)
    def apns_send_bulk_message(registration_ids, alert, application_id=None, *args, **options):
        report()
        tokens = dict(_query(GATE, [list(registration_ids), *_scope(application_id)]))
        passed = [token for token in dict.fromkeys(tokens.values()) if token]
        try:
            results = send(passed, alert, application_id, *args, **options) if passed else {}
        finally:  # Also when the library raises an error because a push has failed.
            report()
        return {stored: results.get(token, WITHHELD) for stored, token in tokens.items()}

    return apns_send_bulk_message


def _noting(create: Any) -> Any:
    def _create_client(*args, application_id=None, **options):
        client = create(*args, application_id=application_id, **options)
        client.pool.send_notification = functools.partial(_note, client.pool.send_notification, *_scope(application_id))
        return client

    return _create_client


async def _note(send: Any, topic: str, environment: str, request: Any) -> Any:
    sent_at = datetime.now(timezone.utc)
    result = await send(request)  # Of the pool: nothing that follows, such as err_func, can hide the answer.
    answer = (result.status, result.description, result.timestamp and str(result.timestamp), sent_at, result.notification_id)
    _unreported.append((topic, request.device_token, *answer, environment))
    return result


def _registering(perform: Any) -> Any:
    @functools.wraps(perform)
    def perform_and_register(view, serializer):
        perform(view, serializer)
        if serializer.instance._meta.label == "push_notifications.APNSDevice":
            try:
                register(serializer.instance)
            except Error:  # Such as a malformed token: the app's request succeeds anyway.
                logger.exception("device %s could not be registered with tokenkeeperd", serializer.instance.pk)

    return perform_and_register


def _query(statement: str, values: list[Any]) -> list[tuple[Any, ...]]:  # In a savepoint: an error must not end the transaction.
    with transaction.atomic(using=ALIAS), connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()


def _scope(application_id: str | None) -> tuple[str, str]:
    topic = get_manager().get_apns_topic(application_id)
    if not topic:
        raise ImproperlyConfigured("tokenkeeper_push needs APNS_TOPIC in PUSH_NOTIFICATIONS_SETTINGS")
    return topic, "sandbox" if get_manager().get_apns_use_sandbox(application_id) else "production"
