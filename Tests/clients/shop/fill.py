"""Fills the table of devices with as many rows as the argument says, as messy as real ones. Prints nothing."""

import sys

import django
from django.db import connection

django.setup()

with connection.cursor() as cursor:
    cursor.execute("INSERT INTO auth_user (id, username, password, is_superuser, first_name, last_name, email, is_staff, is_active, date_joined) "
                   "SELECT i, 'user' || i, '', false, '', '', '', false, true, now() FROM generate_series(1, 1000) AS i")
    cursor.execute("""
        INSERT INTO push_notifications_apnsdevice (name, active, user_id, date_created, application_id, device_id, registration_id)
        SELECT CASE WHEN i % 50 = 0 THEN 'Anna''s "phone"' END,
               i % 10 <> 3,                                                               -- logged out, or deactivated by the library
               CASE WHEN i % 4 > 0 THEN i % 1000 + 1 END,
               CASE WHEN i % 97 > 0 THEN timestamptz '2024-01-01Z' + i * interval '1 minute' END,
               CASE WHEN i % 11 = 5 THEN 'ios-dev' WHEN i % 11 = 6 THEN NULL ELSE 'ios' END, -- another environment; no application
               CASE WHEN i % 3 > 0 THEN md5('device' || i / 2)::uuid END,                  -- some devices have two tokens
               CASE WHEN i % 20 IN (1, 2, 3) THEN upper(t.token)
                    WHEN i % 20 = 4 THEN '<' || regexp_replace(t.token, '(.{8})', '\\1 ', 'g') || '>'
                    WHEN i % 20 = 5 THEN ' ' || t.token || E'\\n'
                    WHEN i % 20 = 6 THEN encode(sha256(('token' || i - 1)::bytea), 'hex')   -- twice, for two users
                    WHEN i % 200 = 7 THEN ''
                    WHEN i % 200 = 8 THEN left(t.token, 63)                                 -- an odd number of digits
                    WHEN i % 200 = 9 THEN t.token || t.token                                -- 64 bytes: APNs may have such tokens one day
                    WHEN i % 200 = 10 THEN 'ExponentPushToken[' || left(t.token, 22) || ']'
                    WHEN i % 200 = 11 THEN '{length = 32, bytes = 0x' || left(t.token, 8) || ' ... ' || right(t.token, 8) || ' }'
                    WHEN i % 200 = 12 THEN '(null)'
                    ELSE t.token END
        FROM generate_series(1, %s) AS i, LATERAL (SELECT encode(sha256(('token' || i)::bytea), 'hex') AS token) AS t
    """.replace("%s", str(int(sys.argv[1]))))
    cursor.execute("ANALYZE push_notifications_apnsdevice")
