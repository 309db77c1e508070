"""What the tests of the clients share. ClientTests.swift runs them, with a database, a daemon and a fake APNs."""

import os
import ssl
import time

import psycopg

TOPIC = "com.example.app"
PROVIDER = os.environ["PROVIDER_URL"]
"""A login with the roles tokenkeeper_app and tokenkeeper_sender."""
OWNER = os.environ["OWNER_URL"]
"""The owner of the schema, or a reader."""


def ask(statement, *values):
    """The first column of the first row, as OWNER sees it."""
    with psycopg.connect(OWNER) as connection:
        return connection.execute(statement, values).fetchone()[0]


def eventually(what, is_so):
    """Repeats a check until it holds. Fails after a minute."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, f"not within a minute: {what}"
        time.sleep(0.02)


def token(name):
    """A token. The fake APNs answers 410 if the name begins with dead, 400 BadDeviceToken with bad, nothing with fff."""
    return name + "0" * (64 - len(name))


def state(token):
    return ask("SELECT max(state) FROM tokenkeeper.token WHERE token = %s", token)


def redirect():
    """Has aioapns send to the fake APNs. It has no setting for the server."""
    from aioapns import connection

    for protocol in (connection.APNsProductionClientProtocol, connection.APNsDevelopmentClientProtocol):
        protocol.APNS_SERVER, protocol.APNS_PORT = "localhost", int(os.environ["APNS_PORT"])
    authority = os.environ["APNS_CA"]
    default = ssl.create_default_context
    ssl.create_default_context = lambda *arguments, **options: default(*arguments, **{"cafile": authority, **options})
