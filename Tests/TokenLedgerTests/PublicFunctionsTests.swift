import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Calls every function that a role may call with random input, as that role. `FUZZ_CALLS` sets the calls per function; `make
/// fuzz` sets 100,000.
@Suite(.ownThread) struct `Public functions` {
    @Test(arguments: ["sender", "app", "reader", "operator"])
    func `each answers any input, or raises an error that its comment names`(role: String) throws {
        let calls = ProcessInfo.processInfo.environment["FUZZ_CALLS"].flatMap(Int.init) ?? 400
        let database = try TestCluster.shared.database()
        try database.psql(
            "CREATE COLLATION public.loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
            user: "postgres")
        try database.psql(
            """
            SELECT tokenkeeper.register(t, p, e, device_id => 'device-1', tags => '{World}')
            FROM unnest('{aa,bb}'::text[]) AS t, unnest('{com.example.app,com.example.app.voip}'::text[]) AS p,
                 unnest('{production,sandbox}'::text[]) AS e
            """)
        // An attached table of the application, with rows, sources of both logins, and a backfill of it.
        try database.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try database.psql(
            """
            GRANT USAGE ON SCHEMA app TO a_operator;
            CREATE TABLE app.devices (id bigserial PRIMARY KEY, token text, topic text, seen timestamptz, active boolean DEFAULT true);
            CREATE INDEX ON app.devices (token);
            CREATE TABLE app.plain (LIKE app.devices INCLUDING ALL);
            INSERT INTO app.devices (token, topic, seen) VALUES ('aa', 'com.example.app', now()), ('dd', 'com.example.app', now()), ('zz', '', now());
            SELECT FROM tokenkeeper.attach('app.devices', 'token', topic => 'topic', registered_at => 'seen')
            """, user: "a_app")
        try database.psql("SELECT FROM tokenkeeper.begin_backfill('app.devices')", user: "a_app")
        try database.psql("SELECT FROM tokenkeeper.begin_check('app.devices')", user: "a_app")
        for user in ["a_app", "a_operator"] {
            try database.psql(
                "SELECT tokenkeeper.begin_import('devices.csv') FROM generate_series(1, 7)",
                user: user)
        }
        // One of them is of a complete list.
        try database.psql(
            "SELECT tokenkeeper.begin_list(4, 'nightly', '2026-01-01Z'), tokenkeeper.advance_source(4, 'x', 1, 0)",
            user: "a_app")
        for user in ["a_sender", "a_operator"] {
            // As the owner of the functions, with the login of each.
            try database.psql(
                "INSERT INTO tokenkeeper.campaign (environment, topic, payload, push_type, audience_kind, content_hash, created_by) VALUES ('production', 'com.example.app', '{}', 'alert', 'everyone', '', '\(user)')"
            )
        }
        let seed = Double(Seed.next(role) % (1 << 32)) / Double(1 << 32)
        var caller = try database.connect(user: "a_\(role)")
        try caller.execute("SELECT setseed(\(seed))")
        try caller.execute(Self.values)
        try caller.execute(Self.fuzz)
        let functions = try caller.lines(
            """
            SELECT p.oid, p.oid::regprocedure, obj_description(p.oid) FROM pg_proc AS p
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND has_function_privilege(p.oid, 'EXECUTE')
              -- These execute the SQL that they are given, with the rights of their caller.
              AND p.proname NOT IN ('sample_rows', 'finds_by_index', 'hold_name', 'next_key',
                  -- These take what another database has made, and no topic moves while its attached table may have any.
                  'take_facts', 'take_policy', 'take_rows', 'begin_move') ORDER BY 2
            """, columns: 3
        ).map { $0.split(separator: "|", maxSplits: 2).map(String.init) }
        #expect(functions.count >= 3, "\(functions)")
        for function in functions {
            var answered = 0
            for chunk in stride(from: 0, to: calls, by: 500) {
                // In transactions of limited size: each call that fails costs a subtransaction.
                let met = try caller.lines(
                    "SELECT state, calls, example FROM pg_temp.fuzz(\(function[0]), \(min(500, calls - chunk)))",
                    columns: 3)
                for line in met {
                    let parts = line.split(separator: "|", maxSplits: 2, omittingEmptySubsequences: false).map(
                        String.init)
                    if parts[0] == "00000" {
                        answered += Int(parts[1]) ?? 0
                    } else if parts[0] != "input" {
                        // What only our own commands call says it to them alone.
                        #expect(
                            function[2].contains(parts[0])
                                || function[2].hasPrefix("Internal") && parts[0].hasPrefix("22"),
                            "\(function[1]) raises \(parts[0]), and its comment does not say so: \(parts[2])")
                    }
                }
            }
            #expect(answered > calls / 50, "\(function[1]) has answered \(answered) of \(calls) calls")
        }
    }

    /// What people, programs and attackers pass: `pg_temp.some_value(parameter, type)`, as text. Raises 22021 at times.
    private static let values = """
        CREATE FUNCTION pg_temp.one_of(VARIADIC choices text[]) RETURNS text LANGUAGE sql
        AS 'SELECT choices[1 + floor(random() * cardinality(choices))]';

        CREATE FUNCTION pg_temp.some_text() RETURNS text LANGUAGE plpgsql AS $f$
        DECLARE
            bytes bytea := decode(md5(random()::text) || md5(random()::text), 'hex');
            backslash text := chr(92);
        BEGIN
            RETURN CASE floor(random() * 24)
                WHEN 0 THEN ''
                WHEN 1 THEN encode(bytes, 'hex')
                WHEN 2 THEN upper(encode(bytes, 'hex'))
                WHEN 3 THEN left(encode(bytes, 'hex'), (random() * 64)::integer)
                WHEN 4 THEN convert_from(bytes, 'UTF8')
                -- A truncated character.
                WHEN 5 THEN convert_from(substring(convert_to(chr(233) || chr(8364) || chr(128512), 'UTF8') FROM 1 FOR (random() * 9)::integer), 'UTF8')
                WHEN 6 THEN convert_from(bytes, 'LATIN1')
                WHEN 7 THEN repeat(left(encode(bytes, 'hex'), 4), (random() * 5000)::integer)
                WHEN 8 THEN repeat(chr(233), (random() * 600)::integer)
                WHEN 9 THEN chr((1 + random() * 55000)::integer) || chr((65536 + random() * 1000000)::integer)
                WHEN 10 THEN pg_temp.one_of('production', 'sandbox', 'PRODUCTION', ' production', 'both')
                WHEN 11 THEN pg_temp.one_of('com.example.app', '.voip', '.', '-', '*', 'com.example.app.push-type.liveactivity')
                WHEN 12 THEN pg_temp.one_of('{"aps":{"alert":"x"}}', '{"aps":{"content-available":1}}', '{"alert":"' || backslash || 'u0000"}',
                    '{"a":"' || backslash || 'ud800"}', '{"a":1e131071}', '{"a":1e999999}', '[]', '"x"', '{', '{"aps":{}} x', 'null', '{"a":1,"a":2}')
                WHEN 13 THEN repeat('[', (random() * 5000)::integer) || repeat(']', (random() * 5000)::integer)
                WHEN 14 THEN (random() * 2e10 - 1e10)::bigint::text
                WHEN 15 THEN pg_temp.one_of('NaN', 'Infinity', '1e400', '-1e-400', '-0', '99999999999999999999999', '9223372036854775807',
                    '-9223372036854775808', '2147483647', '-2147483648', '0x1F')
                WHEN 16 THEN pg_temp.one_of('infinity', '-infinity', '4713-01-01 BC', '294276-12-31 23:59:59.999999+00', '294277-01-01',
                    '1970-01-01', 'now', '2024-02-30', '2000-01-01 24:00:00')
                WHEN 17 THEN (clock_timestamp() + (random() - 0.5) * interval '100 years')::text
                WHEN 18 THEN pg_temp.one_of('true', 'f', 'yes', 'maybe')
                WHEN 19 THEN '%_' || backslash || '''; DROP TABLE x; --$$'
                WHEN 20 THEN chr(1) || chr(9) || chr(10) || chr(127) || chr(8232) || chr(65279)
                WHEN 21 THEN pg_temp.one_of('1 day', '-1 day', '178000000 years', '1e10 years')
                ELSE (floor(random() * 20) - 2)::text
            END;
        END
        $f$;

        CREATE FUNCTION pg_temp.some_value(parameter text, of_type text) RETURNS text LANGUAGE plpgsql AS $f$
        DECLARE
            chance double precision := random();
        BEGIN
            IF chance < 0.03 THEN
                RETURN NULL;
            ELSIF of_type LIKE '%[]' THEN
                RETURN CASE
                    WHEN chance < 0.05 THEN '{{aa,bb},{cc,dd}}'
                    WHEN chance < 0.07 THEN '[0:1]={aa,bb}'
                    WHEN chance < 0.09 THEN pg_temp.some_text()
                    ELSE (SELECT array_agg(pg_temp.some_value(left(parameter, -1), left(of_type, -2)))::text
                          FROM generate_series(1, (random() * 5)::integer)) END;
            ELSIF chance < 0.7 THEN
                -- One that fits, so that what is behind the first check is reached.
                CASE
                    WHEN of_type = 'tokenkeeper.fact' THEN
                        RETURN pg_temp.one_of('(production,com.example.app,aa,2026-01-01Z,d,u,{x})', '(sandbox,com.example.app,bb,2026-02-01Z,d,u,)', NULL);
                    WHEN parameter = 'attachment' THEN RETURN pg_temp.one_of('app.devices', 'devices', 'other');
                    WHEN parameter = 'differences' AND of_type = 'jsonb' THEN RETURN '[{"topic":"t","token":"aa","out":false,"difference":"unknown"}]';
                    WHEN parameter = 'token' THEN RETURN pg_temp.one_of('aa', 'bb', 'AA', 'cc');
                    WHEN parameter = 'topic' THEN RETURN pg_temp.one_of('com.example.app', 'com.example.app.voip', 'com.example.new');
                    WHEN of_type = 'regclass' THEN RETURN pg_temp.one_of('app.devices', 'app.devices', 'app.devices', 'app.plain', 'tokenkeeper.topic');
                    WHEN parameter = 'attached' THEN RETURN pg_temp.one_of('app.devices', 'app.devices', 'app.plain', 'devices', 'app.nothing');
                    -- 1 is the attachment, 2 its backfill, 3 its check, then seven of each login.
                    WHEN parameter IN ('source', 'source_id') THEN
                        RETURN CASE WHEN random() < 0.4 THEN 1 ELSE 1 + floor(random() * 17) END::text;
                    -- One of each login.
                    WHEN parameter = 'campaign_id' THEN RETURN pg_temp.one_of('1', '2');
                    WHEN of_type = 'uuid' THEN RETURN gen_random_uuid()::text;
                    WHEN parameter = 'tags' THEN RETURN pg_temp.one_of('World', 'a && !b', '(a || "b c")', 'a &&');
                    WHEN parameter = 'after' THEN RETURN pg_temp.one_of('0', '1', '2', NULL);
                    WHEN parameter = 'max_rows' THEN RETURN pg_temp.one_of('1', '2', '100');
                    WHEN parameter = 'position' THEN RETURN pg_temp.one_of('row 1', NULL);
                    WHEN parameter = 'facts' THEN RETURN jsonb_build_object('token', 'r.token', 'topic', 'r.topic', 'environment', '''production''::text', 'look_up', 'r.token = ANY (ARRAY[%1$s])');
                    WHEN parameter = 'plan' THEN RETURN jsonb_build_object('facts', jsonb_build_object('token', 'r.token', 'topic', 'r.topic', 'environment', 'r.topic',
                        'look_up', 'r.token = %1$s'), 'old_facts', jsonb_build_object('token', 'old_row.token', 'topic', 'old_row.topic', 'environment', 'old_row.topic'),
                        'columns', '["token", "topic"]'::jsonb, 'key_columns', '["id"]'::jsonb, 'key_text', 'r.id::text', 'on_delete', 'ignore', 'always', false,
                        'arguments', '{}'::jsonb, 'name', 'a' || floor(random() * 100000))::text;
                    WHEN parameter = 'environment' THEN RETURN pg_temp.one_of('production', 'sandbox');
                    WHEN parameter = 'device_id' THEN RETURN pg_temp.one_of('device-1', 'device-2');
                    WHEN parameter = 'priority' THEN RETURN pg_temp.one_of('10', '5', '1');
                    WHEN parameter = 'push_type' THEN RETURN 'alert';
                    WHEN parameter = 'since' THEN RETURN (clock_timestamp() - random() * interval '2 days')::text;
                    WHEN parameter = 'until' THEN RETURN (clock_timestamp() + random() * interval '2 days')::text;
                    WHEN of_type = 'timestamp with time zone' THEN RETURN (clock_timestamp() + (random() - 0.5) * interval '2 years')::text;
                    WHEN of_type IN ('integer', 'bigint', 'smallint') THEN RETURN (floor(random() * 30) - 5)::text;
                    WHEN of_type IN ('numeric', 'double precision') THEN RETURN pg_temp.one_of('0.5', '1', random()::text, (random() * 1e6)::text);
                    WHEN of_type = 'boolean' THEN RETURN pg_temp.one_of('t', 'f');
                    WHEN parameter = 'registrations' THEN RETURN (
                        SELECT jsonb_agg(jsonb_build_object('token', pg_temp.some_value('token', 'text'), 'unregistered', random() < 0.2,
                            pg_temp.one_of('topic', 'environment', 'device_id', 'user_id', 'registered_at', 'tags', 'x'), pg_temp.some_text()))
                        FROM generate_series(1, 1 + (random() * 3)::integer))::text;
                    WHEN of_type IN ('json', 'jsonb') THEN RETURN '{"aps":{"alert":"' || (random() * 100)::integer || '"}}';
                    WHEN of_type = 'tokenkeeper.ledger' THEN RETURN NULL;
                    ELSE NULL;
                END CASE;
            END IF;
            RETURN pg_temp.some_text();
        END
        $f$;
        """

    /// Calls a function with random arguments, some of the last ones left out, under one of four collations. Counts by SQLSTATE; `input`
    /// is what PostgreSQL refuses before the function is called.
    private static let fuzz = """
        CREATE FUNCTION pg_temp.fuzz(of_function oid, many integer, OUT state text, OUT calls bigint, OUT example text) RETURNS SETOF record
        LANGUAGE plpgsql AS $f$
        DECLARE
            names text[] := (SELECT proargnames FROM pg_proc AS p WHERE p.oid = of_function);
            types text[] := (SELECT array_agg(format_type(t, NULL) ORDER BY n) FROM pg_proc AS p, unnest(p.proargtypes) WITH ORDINALITY AS a (t, n)
                             WHERE p.oid = of_function);
            mandatory integer := (SELECT pronargs - pronargdefaults FROM pg_proc AS p WHERE p.oid = of_function);
            seen jsonb := '{}';
            examples jsonb := '{}';
            given integer;
            chosen text;
            arguments text[];
            fitting text[];
            casts text;
            stage text;
            -- What would leave nothing for the next call is undone.
            is_undone boolean := of_function::regproc::text IN ('tokenkeeper.attach', 'tokenkeeper.detach', 'tokenkeeper.begin_attachment',
                'tokenkeeper.end_attachment', 'tokenkeeper.backfill_next', 'tokenkeeper.advance_backfill', 'tokenkeeper.advance_source', 'tokenkeeper.end_check',
                'tokenkeeper.withdraw', 'tokenkeeper.cancel_campaign', 'tokenkeeper.begin_list', 'tokenkeeper.drop_list');
        BEGIN
            FOR n IN 1..many LOOP
                given := mandatory + floor(random() * (cardinality(types) - mandatory + 1));
                chosen := pg_temp.one_of('', ' COLLATE "C"', ' COLLATE "und-x-icu"', ' COLLATE public.loose');
                stage := 'input';
                BEGIN
                    arguments := ARRAY(SELECT pg_temp.some_value(names[i], types[i]) FROM generate_series(1, given) AS i);
                    -- Functions with many arguments, or with narrow ones, also get some that fit together.
                    fitting := CASE of_function::regproc::text
                        WHEN 'tokenkeeper.attach' THEN
                            ARRAY['app.plain', 'token', 'topic', pg_temp.one_of('active', NULL), pg_temp.one_of('''production''', '''sandbox''', 'topic'), 'seen']
                        WHEN 'tokenkeeper.enqueue' THEN
                            ARRAY['{}', pg_temp.one_of('com.example.app', 'com.example.new'), 'production', pg_temp.some_value('tags', 'text')]
                        WHEN 'tokenkeeper.audience_size' THEN
                            ARRAY[pg_temp.one_of('com.example.app', 'com.example.new'), 'production', pg_temp.some_value('tags', 'text')]
                        WHEN 'tokenkeeper.lock_backfill' THEN ARRAY['2']
                        WHEN 'tokenkeeper.backfill_next' THEN ARRAY['2', '100']
                        WHEN 'tokenkeeper.advance_backfill' THEN ARRAY['2', '7', '1', 'f']
                        WHEN 'tokenkeeper.detach' THEN ARRAY['app.devices']
                        WHEN 'tokenkeeper.running_check' THEN ARRAY['3']
                        WHEN 'tokenkeeper.reported_tokens' THEN ARRAY['3']
                        WHEN 'tokenkeeper.check_lost' THEN ARRAY['3']
                        WHEN 'tokenkeeper.check_rows' THEN ARRAY['3', NULL, pg_temp.one_of('2', '100')]
                        WHEN 'tokenkeeper.compare_facts' THEN
                            ARRAY['3', '{"(production,com.example.app,aa,2026-01-01Z,d,u,)"}', pg_temp.one_of('{t}', '{f}')]
                        WHEN 'tokenkeeper.end_check' THEN ARRAY['3', '0', pg_temp.one_of('0', '1')]
                        WHEN 'tokenkeeper.note_attachment_failure' THEN ARRAY['1', '22012', 'x']
                        WHEN 'tokenkeeper.begin_list' THEN ARRAY[(4 + floor(random() * 7))::text, pg_temp.one_of('nightly', 'other'), '2026-02-01Z']
                        WHEN 'tokenkeeper.note_listed' THEN ARRAY['4', '{production}', '{com.example.app}', pg_temp.one_of('{aa}', '{bb}')]
                        WHEN 'tokenkeeper.log_out_unlisted' THEN ARRAY['4', '10']
                        WHEN 'tokenkeeper.drop_list' THEN ARRAY['nightly']
                        WHEN 'tokenkeeper.advance_source' THEN
                            ARRAY[(1 + floor(random() * 16))::text, 'row 1', '1', '0']
                    END;
                    IF fitting IS NOT NULL AND random() < 0.3 THEN
                        arguments := fitting;
                        given := cardinality(fitting);
                    END IF;
                    casts := (SELECT string_agg(format('$1[%s]::%s%s', i, types[i], CASE WHEN types[i] IN ('text', 'text[]') THEN chosen END), ', ' ORDER BY i)
                              FROM generate_series(1, given) AS i);
                    EXECUTE format('SELECT FROM (SELECT %s OFFSET 0) AS input', coalesce(casts, '1')) USING arguments;
                    EXECUTE format('SELECT %s', coalesce(replace(casts, ', $', ' IS NULL, $') || ' IS NULL', '1')) USING arguments;
                    stage := '00000';
                    EXECUTE format('SELECT count(*) FROM (SELECT %s(%s)) AS answer', of_function::regproc, casts) USING arguments;
                    IF is_undone THEN
                        RAISE EXCEPTION 'undone' USING ERRCODE = 'UNDO1';
                    END IF;
                EXCEPTION WHEN OTHERS THEN
                    IF stage <> 'input' AND SQLSTATE <> 'UNDO1' THEN
                        stage := SQLSTATE;
                        examples := jsonb_build_object(stage, left(SQLERRM || ' ' || coalesce(arguments::text, ''), 300)) || examples;
                    END IF;
                END;
                seen := seen || jsonb_build_object(stage, coalesce((seen ->> stage)::bigint, 0) + 1);
            END LOOP;
            RETURN QUERY SELECT s.key, s.value::bigint, replace(examples ->> s.key, '|', '/') FROM jsonb_each_text(seen) AS s;
        END
        $f$;
        """
}
