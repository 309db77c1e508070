"""clients/django/tokenkeeper_push.py, with the real django-push-notifications, aioapns and Django REST framework."""

import os
import sys
import types
import unittest
from unittest import mock
from uuid import UUID

import django
from django.conf import settings
from django.db import DatabaseError, connections, transaction
from psycopg.conninfo import conninfo_to_dict
from stage import PROVIDER, TOPIC, ask, eventually, redirect, state, token

redirect()
# apns2 does not run on Python 3.10 and later: as much of it as the library's older way imports.
sys.modules["apns2"] = types.ModuleType("apns2")
for part in ("client", "credentials", "errors", "payload"):
    sys.modules[f"apns2.{part}"] = module = types.ModuleType(f"apns2.{part}")
    setattr(sys.modules["apns2"], part, module)
    for name in ("APNsClient", "NotificationPriority", "Credentials", "Payload"):
        setattr(module, name, type(name, (), {}))
    module.APNsException = type("APNsException", (Exception,), {})
    module.Unregistered = type("Unregistered", (module.APNsException,), {})
login = conninfo_to_dict(PROVIDER)
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql", "NAME": login["dbname"], "USER": login["user"],
            "HOST": login["host"], "PORT": login["port"],
        }
    },
    INSTALLED_APPS=[
        "django.contrib.contenttypes", "django.contrib.auth", "rest_framework", "push_notifications",
        "tokenkeeper_push.TokenkeeperPush",
    ],
    PUSH_NOTIFICATIONS_SETTINGS={
        "APNS_AUTH_KEY_PATH": os.environ["APNS_KEY"], "APNS_AUTH_KEY_ID": os.environ["APNS_KEY_ID"],
        "APNS_TEAM_ID": os.environ["APNS_TEAM_ID"], "APNS_TOPIC": TOPIC, "UPDATE_ON_DUPLICATE_REG_ID": True,
    },
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": []},
    SECRET_KEY="x", USE_TZ=True, DEBUG=False,
)  # fmt: skip
django.setup()

import tokenkeeper_push  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.core.management import call_command  # noqa: E402
from push_notifications import apns, apns_async  # noqa: E402
from push_notifications.api.rest_framework import APNSDeviceViewSet  # noqa: E402
from push_notifications.exceptions import APNSError, APNSServerError  # noqa: E402
from push_notifications.models import APNSDevice  # noqa: E402
from rest_framework.test import APIRequestFactory  # noqa: E402

call_command("migrate", verbosity=0)


class Sending(unittest.TestCase):
    def test_what_apns_answers_is_reported_and_deactivates_no_device(self):
        devices = [APNSDevice.objects.create(registration_id=token(name)) for name in ("dead01", "bad001", "c1")]
        for device in devices:
            tokenkeeper_push.register(device)
        with self.assertRaises(APNSError) as raised:
            APNSDevice.objects.filter(registration_id__in=[d.registration_id for d in devices]).send_message("Hello")
        self.assertIn("Unregistered, BadDeviceToken", str(raised.exception))
        self.assertEqual([d.active for d in APNSDevice.objects.filter(pk__in=[d.pk for d in devices])], [True] * 3)
        eventually("the 410 counts, with its timestamp", lambda: state(token("dead01")) == "stale")
        eventually("the 400 counts", lambda: state(token("bad001")) == "suspect")
        results = APNSDevice.objects.filter(registration_id__in=[d.registration_id for d in devices]).send_message("Hello")
        self.assertEqual(
            results, [{token("dead01"): "Withheld", token("bad001"): "Withheld", token("c1"): "Success"}])  # fmt: skip
        self.assertEqual(devices[0].send_message("Hello"), {"results": [{"error": "Withheld"}]})
        self.assertEqual(devices[2].send_message("Hello"), {"results": ["Success"]})

    def test_tokens_are_sent_as_apns_takes_them(self):
        plain = token("ab01cd02")
        stored = f"<{plain[:8].upper()} {plain[8:]}>"
        APNSDevice.objects.create(registration_id=stored)
        APNSDevice.objects.create(registration_id=plain)
        APNSDevice.objects.create(registration_id="not a token")
        APNSDevice.objects.create(registration_id="")
        ids = [stored, plain, "not a token", ""]
        (results,) = APNSDevice.objects.filter(registration_id__in=ids).send_message("Hello")
        self.assertEqual(results, {stored: "Success", plain: "Success", "not a token": "Withheld", "": "Withheld"})
        counted = "SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 200 AND topic = %s"
        eventually("it was sent once, and reported", lambda: (ask(counted, TOPIC) or 0) >= 1)

    def test_without_an_answer_nothing_is_reported(self):
        with self.assertRaisesRegex(APNSError, "TimeoutError"):
            APNSDevice.objects.create(registration_id=token("fff1")).send_message("Hello")
        self.assertEqual(ask("SELECT count(*) FROM tokenkeeper.rejected_result"), 0)

    def test_what_could_not_be_reported_is_kept_and_reported_later(self):
        device = APNSDevice.objects.create(registration_id=token("dead02"))
        with transaction.atomic():
            with self.assertLogs("tokenkeeper", "ERROR"), mock.patch.object(type(connections["default"]), "copy", no_connection):
                with self.assertRaises(APNSError):
                    device.send_message("Hello")
            self.assertTrue(APNSDevice.objects.exists(), "the transaction is usable")
        self.assertIsNone(state(token("dead02")))
        tokenkeeper_push.report()
        eventually("the 410 counts", lambda: state(token("dead02")) == "stale")

    def test_a_transaction_that_is_rolled_back_keeps_the_report(self):
        device = APNSDevice.objects.create(registration_id=token("dead03"))
        with self.assertRaises(APNSError), transaction.atomic():  # As ATOMIC_REQUESTS has it.
            device.send_message("Hello")
        eventually("the 410 counts", lambda: state(token("dead03")) == "stale")

    def test_an_error_of_err_func_does_not_hide_what_apns_has_answered(self):
        async def err_func(request, result):
            raise RuntimeError("mail server")

        with self.assertRaisesRegex(APNSError, "mail server"):
            APNSDevice.objects.create(registration_id=token("dead04")).send_message("Hello", err_func=err_func)
        eventually("the 410 counts", lambda: state(token("dead04")) == "stale")

    def test_no_way_of_the_library_deactivates_a_device(self):
        device = APNSDevice.objects.create(registration_id=token("dead05"))
        other = APNSDevice.objects.create(registration_id=token("dead06"))  # The gate may withhold the first one by then.
        with self.assertRaises(APNSError):
            apns_async.apns_send_message(device.registration_id, "Hello")
        with self.assertRaises(APNSError):
            apns_async.apns_send_bulk_message([other.registration_id], "Hello")
        with mock.patch.object(apns, "_apns_send", return_value={token("dead05"): "Unregistered"}):
            apns.apns_send_bulk_message([device.registration_id], "Hello")
        with mock.patch.object(apns, "_apns_send", side_effect=apns.apns2_errors.Unregistered), self.assertRaises(APNSServerError):
            apns.apns_send_message(device.registration_id, "Hello")
        for each in (device, other):
            each.refresh_from_db()
            self.assertTrue(each.active)


class Registering(unittest.TestCase):
    def post(self, **data):
        view = APNSDeviceViewSet.as_view({"post": "create"})
        request = APIRequestFactory().post("/", data, format="json")
        response = view(request)
        self.assertIn(response.status_code, (200, 201), response.data)

    def test_each_launch_of_the_app_registers_its_device(self):
        device = "123E4567-E89B-12D3-A456-426614174000"
        self.post(registration_id=token("dead07"), device_id=device)
        row = "SELECT device_id || ' ' || environment FROM tokenkeeper.token WHERE token = %s"
        self.assertEqual(ask(row, token("dead07")), f"{str(UUID(device))} production")
        with self.assertRaises(APNSError):
            APNSDevice.objects.get(registration_id=token("dead07")).send_message("Hello")
        eventually("the 410 counts", lambda: state(token("dead07")) == "stale")
        self.post(registration_id=token("dead07"), device_id=device)
        self.assertEqual(state(token("dead07")), "active", "a launch revives it, although no column has changed")

    def test_an_inactive_device_is_unregistered(self):
        self.post(registration_id=token("c7"))
        self.post(registration_id=token("c7"), active=False)
        self.assertEqual(state(token("c7")), "unregistered_by_app")

    def test_saving_a_device_revives_nothing(self):
        device = APNSDevice.objects.create(registration_id=token("c8"))
        tokenkeeper_push.register(device)
        device.active = False
        self.assertIs(tokenkeeper_push.register(device), False)
        device.active, device.name = True, "renamed in the admin"
        device.save()
        self.assertEqual(state(token("c8")), "unregistered_by_app")

    def test_the_owner_of_a_device_is_its_user(self):
        user = User.objects.create(username="u")
        device = APNSDevice.objects.create(registration_id=f" {token('c9').upper()}", user=user)
        self.assertIs(tokenkeeper_push.register(device), True)
        owner = "SELECT user_id FROM tokenkeeper.token WHERE token = %s"
        self.assertEqual(ask(owner, token("c9")), str(user.pk))
        device.user = None
        tokenkeeper_push.register(device)
        self.assertIsNone(ask(owner, token("c9")))

    def test_a_token_that_the_ledger_refuses_fails_no_request_of_the_app(self):
        with self.assertLogs("tokenkeeper", "ERROR"):
            self.post(registration_id="abc")
        self.assertTrue(APNSDevice.objects.filter(registration_id="abc").exists())


def no_connection(*_):
    class Gone:
        def cursor(self):
            raise DatabaseError("the server is gone")

        def close(self):
            pass

    return Gone()


if __name__ == "__main__":
    unittest.main()
