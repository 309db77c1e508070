"""tokenkeeperd for django-push-notifications 3.3: gate, reports and registrations for its APNs devices, in one file.

Copy this file next to manage.py, and add it to the settings. `send_message` then asks the gate, and reports what APNs answered.

    INSTALLED_APPS = [..., "push_notifications", "tokenkeeper_push.TokenkeeperPush"]
    TOKENKEEPER_DATABASE = "default"    # The alias in DATABASES: this is the default.

The library no longer deactivates devices: it ignores the timestamp of a 410, and a sender in the wrong environment would deactivate all.
Its REST views register a device with tokenkeeperd at each launch of the app; call `tokenkeeper_push.register(device)` in your own views.
The login needs the roles tokenkeeper_app and tokenkeeper_sender. Reports take part in the transaction that is open while you send.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, transaction

WITHHELD = "Withheld"  # The result of a token that was not sent to: the gate withholds it, or it is malformed.

# Each registration_id, with the token as APNs takes it (many tables have it as <abcd ef01>); null if it may not be sent to.
GATE = """
    WITH given AS (SELECT g.stored, tokenkeeper.parse_token(g.stored) AS token FROM unnest(%s::text[]) AS g (stored))
    SELECT g.stored, s.token
    FROM given AS g LEFT JOIN tokenkeeper.sendable(ARRAY(SELECT DISTINCT token FROM given), %s, %s) AS s (token) USING (token)"""

logger = logging.getLogger("tokenkeeper")
_answered: ContextVar[list[tuple[Any, ...]]] = ContextVar("tokenkeeper_answered")


class TokenkeeperPush(AppConfig):
    name = "tokenkeeper_push"

    def ready(self) -> None:
        try:
            from push_notifications import apns_async, models
        except ImportError as error:
            raise ImproperlyConfigured(f"tokenkeeper_push needs django-push-notifications with aioapns: {error}") from error
        for part in ("apns_send_bulk_message", "_send_request", "models"):
            if not hasattr(apns_async, part):
                raise ImproperlyConfigured(f"tokenkeeper_push works with django-push-notifications 3.3: there is no {part}")
        apns_async._send_request = _noting(apns_async._send_request)
        apns_async.apns_send_bulk_message = _gated(apns_async.apns_send_bulk_message)
        # The library uses this name only to deactivate the devices of the tokens that APNs rejects.
        nothing = SimpleNamespace(filter=lambda **_: models.APNSDevice.objects.none())
        apns_async.models = SimpleNamespace(APNSDevice=SimpleNamespace(objects=nothing))
        if find_spec("rest_framework"):
            from push_notifications.api.rest_framework import DeviceViewSetMixin as Views

            Views.perform_create = _registering(Views.perform_create)
            Views.perform_update = _registering(Views.perform_update)


def register(device: Any) -> bool:
    """Tell tokenkeeperd that the app of this APNSDevice has registered now. Return whether its token may be sent to.

    Call it at each launch of the app, also if nothing about the device has changed. An inactive device is unregistered.
    """
    scope = _scope(device.application_id)
    token = _query("SELECT coalesce(tokenkeeper.parse_token(%s), %s)", [device.registration_id, device.registration_id])[0][0]
    if not device.active:
        _query("SELECT tokenkeeper.unregister(%s, %s, %s)", [token, *scope])
        return False
    statement = "SELECT tokenkeeper.register(%s, %s, %s, device_id => %s, user_id => %s)"
    owner = "" if device.user_id is None else str(device.user_id)
    return _query(statement, [token, *scope, device.device_id and str(device.device_id), owner])[0][0]


def _gated(send: Any) -> Any:
    @functools.wraps(send)
    def apns_send_bulk_message(registration_ids, alert, application_id=None, *args, **options):
        scope = _scope(application_id)
        tokens = dict(_query(GATE, [list(registration_ids), *scope]))
        passed = [token for token in dict.fromkeys(tokens.values()) if token]
        before = _answered.set(answered := [])
        try:
            results = send(passed, alert, application_id, *args, **options) if passed else {}
        finally:  # Also when the library raises an error because a push has failed.
            _answered.reset(before)
            _report(answered, *scope)
        return {stored: results.get(token, WITHHELD) for stored, token in tokens.items()}

    return apns_send_bulk_message


def _noting(send: Any) -> Any:
    @functools.wraps(send)
    async def _send_request(apns, request):
        sent_at = datetime.now(timezone.utc)
        token, result = await send(apns, request)
        if result.status.isdigit():  # Otherwise APNs has not answered.
            timestamp = None if result.timestamp is None else str(result.timestamp)
            _answered.get([]).append((token, result.status, result.description, timestamp, sent_at, result.notification_id))
        return token, result

    return _send_request


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


def _report(answered: list[tuple[Any, ...]], topic: str, environment: str) -> None:
    statement = "SELECT tokenkeeper.report(%s, %s, %s, %s, %s, %s, %s, %s)"
    try:
        with _cursor() as cursor:
            cursor.executemany(statement, [(topic, *answer, environment) for answer in answered])
    except Error:  # The pushes were sent: an error here would have the caller send them again.
        logger.exception("%d results of APNs could not be reported", len(answered))


@contextmanager
def _cursor() -> Any:  # In a savepoint: an error must not end the caller's transaction.
    alias = getattr(settings, "TOKENKEEPER_DATABASE", "default")
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        yield cursor


def _query(statement: str, values: list[Any]) -> list[tuple[Any, ...]]:
    with _cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()


def _scope(application_id: str | None) -> tuple[str, str]:
    from push_notifications.conf import get_manager

    topic = get_manager().get_apns_topic(application_id)
    if not topic:
        raise ImproperlyConfigured("tokenkeeper_push needs APNS_TOPIC in PUSH_NOTIFICATIONS_SETTINGS")
    return topic, "sandbox" if get_manager().get_apns_use_sandbox(application_id) else "production"
