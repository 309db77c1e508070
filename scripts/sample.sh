# The sample of traffic of `make run` and of compose.yaml. Source it with $PGHOST, the folder of the socket of a private PostgreSQL, and with $PGDATABASE.
# The caller defines:
#   ask ARGUMENTS…           psql with these, plain and quiet
#   program ROLE COMMAND…    tokenkeeperd, connected as the role
#   has_owner                whether to go on
#   alive daemon             whether the daemon still runs
#   nap SECONDS              a sleep that a signal ends

# The database, the schema, and a login for each role.
sample_database() {
    if [ "$(ask -d postgres -c "SELECT count(*) FROM pg_database WHERE datname = 'tokenkeeper'")" = 0 ]; then
        ask -d postgres -c "CREATE ROLE owner LOGIN" -c "CREATE DATABASE tokenkeeper OWNER owner"
    fi
    program postgres migrate --owner owner --grants
    if [ "$(ask -c "SELECT count(*) FROM pg_roles WHERE rolname = 'sample_daemon'")" = 0 ]; then
        for role in daemon sender app operator; do
            ask -c "CREATE ROLE sample_$role LOGIN IN ROLE tokenkeeper_$role"
        done
    fi
}

topic=com.example.sample
app() { PGUSER=sample_app ask -c "$1" >/dev/null; }
send() { PGUSER=sample_sender ask -c "INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at) $1"; }
# Device tokens number $1 to $2 of this run, as the text of 32 bytes.
run_id=$(date +%s)
tokens() { echo "(SELECT encode(sha256(('$run_id/' || i)::bytea), 'hex') AS token FROM generate_series($1, $2) AS i) AS d"; }
milliseconds='(extract(epoch FROM clock_timestamp()) * 1000)::bigint'

heading=$(printf '%8s %8s %8s %8s %10s %8s %9s %9s %7s %10s' queued active stale suspect logged-out rejected accepted late-410s outbox suppressed)
numbers() {
    ask -F ' ' -c "
        SELECT format('%8s %8s %8s %8s %10s %8s %9s %9s %7s %10s',
            (SELECT count(*) FROM tokenkeeper.send_result),
            count(*) FILTER (WHERE state = 'active'), count(*) FILTER (WHERE state = 'stale'),
            count(*) FILTER (WHERE state = 'suspect'), count(*) FILTER (WHERE state = 'unregistered_by_app'),
            (SELECT count(*) FROM tokenkeeper.rejected_result),
            (SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_stat WHERE status = 200),
            (SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'late_feedback_ignored'),
            (SELECT count(*) FROM tokenkeeper.send_request), (SELECT count(*) FROM tokenkeeper.suppressed_send))
        FROM tokenkeeper.token"
}
# The tables that must drain. An earlier run may have left requests in the outbox, which nothing sends before the sending part.
waiting='(SELECT count(*) FROM tokenkeeper.send_result)'
drained() {
    local end=$((SECONDS + 300))
    while [ "$SECONDS" -lt "$end" ]; do
        has_owner || exit 0
        [ "$(ask -c "SELECT $waiting")" = 0 ] && return
        sleep 0.05
    done
    echo "sample: the outbox or the queue has not drained" >&2
    exit 1
}
step() {
    echo
    echo "* $1"
    numbers
    drained
    numbers
}

# What your own sender and app report, step by step.
sample_ledger() {
    echo
    echo "$heading"
    app "SELECT count(tokenkeeper.register(token, '$topic', device_id => 'device-' || left(token, 8), tags => '{World}')) FROM $(tokens 1 1000)"
    step "1000 devices register."
    send "SELECT '$topic', token, 200, NULL, clock_timestamp() FROM $(tokens 1 1000), generate_series(1, 10)"
    send "SELECT '$topic', upper(token), 410, '{\"reason\":\"Unregistered\",\"timestamp\":' || $milliseconds || '}', clock_timestamp() FROM $(tokens 1 40)"
    step "A sender reports: APNs accepted 10000 sends, and answered 410 for 40 devices. Those are suppressed."
    app "SELECT count(tokenkeeper.register(token, '$topic')) FROM $(tokens 1 10)"
    step "10 of them come back: the app launches and registers again."
    send "SELECT '$topic', token, 410, '{\"reason\":\"Unregistered\",\"timestamp\":' || $milliseconds - 3600000 || '}', clock_timestamp() FROM $(tokens 61 70)"
    step "Late 410s, an hour old, for 10 devices that have registered since: noted, and ignored."
    send "SELECT '$topic', token, 400, '{\"reason\":\"BadDeviceToken\"}', clock_timestamp() FROM $(tokens 41 45)"
    app "SELECT count(*) FROM $(tokens 51 53), LATERAL tokenkeeper.unregister(token, '$topic')"
    step "5 tokens that APNs calls bad, and 3 users who log out."
    send "VALUES ('$topic', 'this is no hex', 410, NULL, NULL), (NULL, 'aa', 410, NULL, NULL), ('$topic', 'aa', 4711, NULL, NULL),
        ('$topic', 'aa', 410, '{\"timestamp\":1508249865}', 'now'::timestamptz)"
    step "Malformed rows from a sender: kept with their errors in tokenkeeper.rejected_result."
    send "SELECT '$topic', token, 400, '{\"reason\":\"BadDeviceToken\"}', clock_timestamp() FROM $(tokens 101 400)"
    step "A sender in the wrong environment: BadDeviceToken for 300 tokens. The mass-failure guard holds them; nobody is suppressed."
    program sample_operator held discard --topic "$topic" | sed 's/^/    held discard: /'
    echo
    echo "* The gate: of the 1000, $(PGUSER=sample_sender ask -c "
        SELECT count(*) FROM tokenkeeper.sendable(ARRAY(SELECT token FROM $(tokens 1 1000)), '$topic')") may be sent to."
}

# Some traffic and, if they have changed, the numbers.
last=
traffic() {
    alive daemon || { echo "sample: the daemon has ended" >&2; exit 1; }
    send "SELECT '$topic', token, CASE WHEN random() < 0.02 THEN 410 ELSE 200 END,
        '{\"reason\":\"Unregistered\",\"timestamp\":' || floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint || '}', clock_timestamp()
        FROM $(tokens 1 1000) WHERE random() < 0.1"
    app "SELECT count(tokenkeeper.register(token, '$topic')) FROM $(tokens 1 1000) WHERE random() < 0.002"
    local now
    now=$(numbers)
    [ "$now" = "$last" ] || echo "$now"
    last=$now
}

campaign=com.example.campaign
# Only devices of this run: the ledger is kept, and the devices of all runs would be more each time.
everybody=World:$run_id group=group:$run_id:
sender() { PGUSER=sample_sender ask -c "$1"; }
enqueue() { sender "SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"$1\"}}', '$campaign', tags => '$2', name => '$1')"; }
size() { sender "SELECT tokenkeeper.audience_size('$campaign', tags => '$1')"; }

# What the daemon sends itself.
sample_sending() {
    waiting="$waiting + (SELECT count(*) FROM tokenkeeper.send_request) + (SELECT count(*) FROM tokenkeeper.campaign WHERE state IN ('waiting', 'running'))"
    app "SELECT count(tokenkeeper.register(token, '$campaign', registered_at => now() - interval '1 day', tags => ARRAY['World', '$everybody', '$group' || i % 10]))
        FROM (SELECT encode(sha256(('$run_id/campaign/' || i)::bytea), 'hex') AS token, i FROM generate_series(1, 1000) AS i) AS d"
    echo
    echo "* Sending: 1000 devices of an app without a sender of its own. The daemon sends campaign $(enqueue Hello "$everybody") to the tag $everybody, over HTTP/2 to a
  fake APNs, where 3 % of all devices are gone."
    drained
    numbers
    echo
    echo "* The next campaign, $(enqueue 'Hello again' "$everybody"), goes to the $(size "$everybody") that are left: stale tokens are not addressed."
    drained
    numbers
}

# Campaigns and traffic, until the caller's end.
sample_traffic() {
    last=
    while has_owner; do
        enqueue "Hello, some" "$group$((RANDOM % 10))" >/dev/null
        traffic
        nap 2
    done
}
