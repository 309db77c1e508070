"""Sends to the devices with the ids from..to, as the provider does. For Tests/clients/shop."""

import sys

from stage import redirect

redirect()

import django  # noqa: E402

django.setup()

from push_notifications.exceptions import APNSError  # noqa: E402
from push_notifications.models import APNSDevice  # noqa: E402

first, last = map(int, sys.argv[1:])
for application in ("ios", "ios-dev"):
    try:
        APNSDevice.objects.filter(id__range=(first, last), application_id=application).send_message("Hello")
    except APNSError as error:  # One of the pushes was refused.
        print(error)
