-- Campaigns for people: create, pause, resume and cancel one, and look up one of its requests.
--
-- Locks: the campaign's row, then its open batches, then its requests, each in order of their numbers. So a call waits for the daemons' short transactions, and
-- they skip what it holds.

CREATE OR REPLACE FUNCTION tokenkeeper.campaign_apns_id(campaign_id bigint, number bigint) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (lpad(to_hex(campaign_id), 12, '0') || '80008000' || lpad(to_hex(number), 12, '0'))::uuid;
COMMENT ON FUNCTION tokenkeeper.campaign_apns_id(bigint, bigint) IS
    'The apns-id of a campaign''s request: a UUID of version 8 with 48 bits for the campaign_id and 48 for the number of the request.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaign_request_of(apns_id uuid, OUT campaign_id bigint, OUT number bigint)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    id bytea := uuid_send(campaign_request_of.apns_id);
BEGIN
    IF substring(id FROM 7 FOR 4) = decode('80008000', 'hex') THEN
        campaign_id := ('x' || encode(substring(id FROM 1 FOR 6), 'hex'))::bit(48)::bigint;
        number := ('x' || encode(substring(id FROM 11 FOR 6), 'hex'))::bit(48)::bigint;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaign_request_of(uuid) IS 'The inverse of campaign_apns_id; nulls for another UUID.';

CREATE OR REPLACE FUNCTION tokenkeeper.has_expired(expiration timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN coalesce(expiration > 'epoch' AND expiration <= clock_timestamp(), false);
COMMENT ON FUNCTION tokenkeeper.has_expired(timestamptz) IS
    'Internal: whether the expiration of a campaign has passed. Null never passes; the epoch stands for one try only.';

CREATE OR REPLACE FUNCTION tokenkeeper.may_manage_campaign(created_by text) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN may_manage_campaign.created_by COLLATE "C" = tokenkeeper.caller()
        OR pg_has_role(session_user, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = 'tokenkeeper.campaign'::regclass), 'USAGE')
        OR coalesce(pg_has_role(session_user, to_regrole('tokenkeeper_operator'), 'USAGE'), false);
END
$$;
COMMENT ON FUNCTION tokenkeeper.may_manage_campaign(text) IS
    'Whether the login role may pause, resume and cancel a campaign that this role created, and set its rate: its own, or any if it is an operator or the '
    'owner.';

CREATE OR REPLACE FUNCTION tokenkeeper.sending_fault(topic text, environment text) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    the_topic text COLLATE "C" := sending_fault.topic;
    the_environment text COLLATE "C" := sending_fault.environment;
    described jsonb[] := ARRAY(SELECT d.credentials FROM tokenkeeper.sending_daemon AS d
                               WHERE d.heartbeat_at > clock_timestamp() - interval '1 minute' AND d.stopped_at IS NULL);
BEGIN
    IF described = '{}' THEN
        RETURN 'no running daemon sends';
    END IF;
    IF NOT EXISTS (
        SELECT FROM unnest(described) AS d (credentials)
        CROSS JOIN LATERAL jsonb_array_elements(CASE jsonb_typeof(d.credentials) WHEN 'array' THEN d.credentials ELSE '[]' END) AS c (credential)
        CROSS JOIN LATERAL jsonb_array_elements_text(CASE jsonb_typeof(c.credential -> 'topics') WHEN 'array' THEN c.credential -> 'topics' ELSE '[]' END)
            AS p (pattern)
        WHERE (c.credential -> 'environments' IS NULL OR c.credential -> 'environments' ? the_environment)
          AND (p.pattern COLLATE "C" = the_topic OR (right(p.pattern, 1) = '*' AND starts_with(the_topic, left(p.pattern, -1)))))
    THEN
        RETURN 'no running daemon has a credential for ' || the_topic || ' (' || the_environment || ')';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.sending_fault(text, text) IS
    'Internal: why no running daemon can send to a topic: none sends at all, or none has a credential for it. Null if one can.';

CREATE OR REPLACE FUNCTION tokenkeeper.unknown_tags(of_topic integer, expression text) RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
-- By the index on tags, and never by a long scan for a row that may not exist.
SET enable_seqscan = off
SET enable_indexscan = off
SET jit = off
AS $$
DECLARE
    tag text COLLATE "C";
    is_small boolean := pg_relation_size('tokenkeeper.ledger') < 16777216;
    -- To look for one token with a common tag, the index would collect all of them.
    common text[] COLLATE "C";
    is_known boolean;
BEGIN
    IF NOT is_small THEN
        SELECT ARRAY(SELECT e.tag FROM unnest(s.most_common_elems::text::text[], s.most_common_elem_freqs) AS e (tag, share)
                     WHERE e.share * c.reltuples > 1000)
        INTO common FROM pg_stats AS s CROSS JOIN pg_class AS c
        WHERE s.schemaname = 'tokenkeeper' AND s.tablename = 'ledger_tags' AND c.oid = 'tokenkeeper.ledger'::regclass;
        IF common IS NULL THEN
            -- Before the first ANALYZE.
            RETURN;
        END IF;
    END IF;
    FOR tag IN
        SELECT DISTINCT replace(replace(m.matched[1], '''''', ''''), chr(92) || chr(92), chr(92)) COLLATE "C"
        FROM regexp_matches(tokenkeeper.tag_query(expression)::text, '''((?:[^'']|'''')*)''', 'g') AS m (matched) ORDER BY 1 LIMIT 20
    LOOP
        CONTINUE WHEN tag = ANY (common);
        EXECUTE format('SELECT EXISTS (SELECT FROM tokenkeeper.ledger AS l '
                       'WHERE l.topic_id = $1 AND tokenkeeper.tag_vector(l.tags) @@ %L::tsquery AND l.tags <> ''{}'')',
                       tokenkeeper.tag_query('"' || replace(tag, '"', '""') || '"'))
            INTO is_known USING of_topic;
        IF NOT is_known THEN
            RETURN NEXT tag;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.unknown_tags(integer, text) IS
    'Which of the first 20 tags of an expression no token of a topic has, such as mistyped ones. A tag that is common in the whole ledger counts as known, '
    'and so does each tag in a large ledger without statistics. Raises 22023 for an invalid expression.';

CREATE OR REPLACE FUNCTION tokenkeeper.new_campaign_id() RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    id bigint;
BEGIN
    LOOP
        id := nextval('tokenkeeper.campaign_campaign_id_seq');
        -- The sequence may be behind: in a database that was restored without it, that logical replication has filled, or once it has begun again.
        EXIT WHEN NOT EXISTS (SELECT FROM tokenkeeper.campaign AS c WHERE c.campaign_id = id);
    END LOOP;
    RETURN id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.new_campaign_id() IS 'The campaign_id for a new campaign, which no campaign has.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaign_fault(scheduled_at timestamptz, name text, idempotency_key text, max_per_second integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN NOT isfinite(scheduled_at) THEN 'scheduled_at is infinite, expected a finite instant, or null'
    WHEN octet_length(name) > 200 THEN 'name is ' || octet_length(name) || ' bytes long, expected at most 200'
    WHEN octet_length(idempotency_key) NOT BETWEEN 1 AND 200 THEN 'idempotency_key is ' || octet_length(idempotency_key) || ' bytes long, expected 1 to 200'
    WHEN max_per_second NOT BETWEEN 1 AND 1000000 THEN 'max_per_second is ' || max_per_second || ', expected 1 to 1000000, or null'
END;
COMMENT ON FUNCTION tokenkeeper.campaign_fault(timestamptz, text, text, integer) IS
    'Internal: what is wrong with these arguments of enqueue; null if nothing. See send_fault for the others.';

CREATE OR REPLACE FUNCTION tokenkeeper.add_campaign(
    payload json, topic text, environment text, tags text, push_type text, priority integer, expiration timestamptz, collapse_id text,
    scheduled_at timestamptz, device_id text, user_id text, tokens text[], everyone boolean, name text, idempotency_key text, max_per_second integer,
    confirm boolean, OUT campaign_id bigint, OUT is_new boolean, OUT of_topic integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    env text COLLATE "C" := coalesce(add_campaign.environment, 'production');
    the_topic text COLLATE "C" := add_campaign.topic;
    body jsonb := tokenkeeper.parsed_payload(add_campaign.payload);
    kind text COLLATE "C" := coalesce(add_campaign.push_type, tokenkeeper.push_type_of(body, the_topic));
    fault text := CASE WHEN body IS NULL AND add_campaign.payload IS NOT NULL THEN tokenkeeper.payload_fault(add_campaign.payload)
                       ELSE tokenkeeper.send_fault(env, the_topic, body, kind, add_campaign.priority, add_campaign.expiration, add_campaign.collapse_id,
                                                   add_campaign.scheduled_at, NULL) END;
    creator text COLLATE "C" := tokenkeeper.caller();
    -- Bytes that are not UTF-8 stay as they are.
    encoding CONSTANT name COLLATE "C" := CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END;
    asked record;
    named record;
    hash bytea;
    known bytea;
BEGIN
    fault := coalesce(fault, tokenkeeper.campaign_fault(
        add_campaign.scheduled_at, add_campaign.name, add_campaign.idempotency_key, add_campaign.max_per_second));
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    asked := tokenkeeper.audience_of(add_campaign.tags, add_campaign.device_id, add_campaign.user_id, add_campaign.tokens, add_campaign.everyone);
    IF asked.fault IS NOT NULL THEN
        RAISE EXCEPTION '%', asked.fault USING ERRCODE = 'invalid_parameter_value', HINT = asked.hint;
    END IF;
    -- Everything that changes what is sent, to whom and when.
    hash := sha256(convert_to(jsonb_build_object(
        'payload', body, 'topic', the_topic, 'environment', env, 'push_type', kind, 'priority', add_campaign.priority,
        'expiration', extract(epoch FROM add_campaign.expiration), 'collapse_id', add_campaign.collapse_id,
        'scheduled_at', extract(epoch FROM add_campaign.scheduled_at), 'max_per_second', add_campaign.max_per_second, 'kind', asked.kind,
        'audience', asked.value, 'tokens', encode(sha256(convert_to(coalesce(array_to_string(asked.tokens, ' '), ''), encoding)), 'hex'))::text, encoding));
    is_new := false;
    FOR attempt IN 1..2 LOOP
        IF add_campaign.idempotency_key IS NOT NULL THEN
            SELECT c.campaign_id, c.content_hash INTO campaign_id, known FROM tokenkeeper.campaign AS c
            WHERE c.created_by = creator AND c.idempotency_key = add_campaign.idempotency_key COLLATE "C";
        END IF;
        EXIT WHEN campaign_id IS NOT NULL;
        IF attempt = 2 THEN
            RAISE EXCEPTION 'another transaction has just used this %', CASE WHEN add_campaign.idempotency_key IS NULL THEN 'id' ELSE 'idempotency_key or id' END
                USING ERRCODE = 'unique_violation', HINT = 'Repeat the call.';
        END IF;
        -- Not for a repetition of what was accepted in time.
        named := tokenkeeper.find_topic(the_topic, env);
        fault := CASE WHEN add_campaign.expiration > 'epoch' AND add_campaign.expiration <= clock_timestamp()
                      THEN 'expiration has passed, expected a later instant, ''epoch'' or null' ELSE named.fault END;
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value', HINT = coalesce(named.hint, 'Null is no expiration.');
        END IF;
        of_topic := (SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic_id = named.topic_id AND tokenkeeper.is_here(t.topic, t.moved_to));
        fault := CASE WHEN add_campaign.confirm IS NOT TRUE THEN tokenkeeper.confirmation_fault(
            of_topic, CASE asked.kind WHEN 'tags' THEN asked.value END, asked.kind = 'everyone', cardinality(asked.tokens)) END;
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value', HINT = 'tokenkeeper.audience_size counts an audience.';
        END IF;
        INSERT INTO tokenkeeper.campaign AS c (
            campaign_id, name, environment, topic, payload, push_type, priority, expiration, collapse_id, scheduled_at, max_per_second,
            audience_kind, audience, has_list, idempotency_key, content_hash, is_confirmed, expected, created_by)
        OVERRIDING SYSTEM VALUE
        -- Through jsonb, to remove the blanks of the caller's spelling.
        VALUES (tokenkeeper.new_campaign_id(), add_campaign.name, env, the_topic,
                body::text::json, kind, add_campaign.priority, add_campaign.expiration, add_campaign.collapse_id, add_campaign.scheduled_at,
                add_campaign.max_per_second, asked.kind, asked.value, asked.kind = 'tokens', add_campaign.idempotency_key, hash,
                coalesce(add_campaign.confirm, false), cardinality(asked.tokens), creator)
        -- Waits for a transaction that is about to commit the same key.
        ON CONFLICT DO NOTHING
        RETURNING c.campaign_id INTO campaign_id;
        is_new := campaign_id IS NOT NULL;
        INSERT INTO tokenkeeper.campaign_token (campaign_id, given_in, token) SELECT add_campaign.campaign_id, NULL, t FROM unnest(asked.tokens) AS t WHERE is_new;
        EXIT WHEN is_new;
    END LOOP;
    IF NOT is_new AND known IS DISTINCT FROM hash THEN
        RAISE EXCEPTION 'idempotency_key % belongs to campaign %, which has another content', quote_literal(add_campaign.idempotency_key), campaign_id
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use a new key for a new campaign.';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.add_campaign(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean) IS
    'Adds a campaign for enqueue, unless the idempotency_key has one. Returns the id, whether it is new, and then the topic_id.';

CREATE OR REPLACE FUNCTION tokenkeeper.enqueue(
    payload json,
    topic text,
    environment text DEFAULT 'production',
    tags text DEFAULT NULL,
    push_type text DEFAULT NULL,
    priority integer DEFAULT NULL,
    expiration timestamptz DEFAULT NULL,
    collapse_id text DEFAULT NULL,
    scheduled_at timestamptz DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    tokens text[] DEFAULT NULL,
    everyone boolean DEFAULT false,
    name text DEFAULT NULL,
    idempotency_key text DEFAULT NULL,
    max_per_second integer DEFAULT NULL,
    confirm boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    env text COLLATE "C" := coalesce(enqueue.environment, 'production');
    added record;
    fault text := tokenkeeper.arguments_fault(
        '{payload,topic,environment,tags,push_type,collapse_id,device_id,user_id,name,idempotency_key,tokens}',
        ARRAY[tokenkeeper.length_of_payload(enqueue.payload), octet_length(enqueue.topic), octet_length(enqueue.environment), octet_length(enqueue.tags),
              octet_length(enqueue.push_type), octet_length(enqueue.collapse_id), octet_length(enqueue.device_id), octet_length(enqueue.user_id),
              octet_length(enqueue.name), octet_length(enqueue.idempotency_key), (SELECT sum(octet_length(t)) FROM unnest(enqueue.tokens) AS t)]);
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value', HINT = 'Copy a long list of tokens into tokenkeeper.campaign_token.';
    END IF;
    IF tokenkeeper.isolation_fault() IS NOT NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.isolation_fault() USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    -- An assignment, because a query would be a line of CONTEXT in each error.
    added := tokenkeeper.add_campaign(
        enqueue.payload, enqueue.topic, enqueue.environment, enqueue.tags, enqueue.push_type, enqueue.priority, enqueue.expiration, enqueue.collapse_id,
        enqueue.scheduled_at, enqueue.device_id, enqueue.user_id, enqueue.tokens, enqueue.everyone, enqueue.name, enqueue.idempotency_key,
        enqueue.max_per_second, enqueue.confirm);
    IF NOT added.is_new THEN
        IF EXISTS (SELECT FROM tokenkeeper.campaign AS c WHERE c.campaign_id = added.campaign_id AND c.state = 'cancelled') THEN
            RAISE NOTICE 'campaign % has this idempotency_key and is cancelled: nothing is sent', added.campaign_id
                USING HINT = 'Use a new key for a new campaign.';
        END IF;
        RETURN added.campaign_id;
    END IF;
    fault := tokenkeeper.sending_fault(enqueue.topic, env);
    IF fault IS NOT NULL THEN
        RAISE NOTICE '%: the campaign waits', fault USING HINT = 'A daemon sends to the topics of each [credential.NAME] in its configuration.';
    END IF;
    -- A list may have tokens that are not registered.
    IF enqueue.tokens IS NULL AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = added.of_topic) THEN
        RAISE NOTICE '% (%) has no token', enqueue.topic, env;
    ELSIF enqueue.tags IS NOT NULL THEN
        FOR fault IN SELECT t FROM tokenkeeper.unknown_tags(added.of_topic, enqueue.tags) AS t LOOP
            RAISE NOTICE 'no token of % (%) has the tag %', enqueue.topic, env, quote_literal(fault)
                USING HINT = 'Upper and lower case differ. tokenkeeper.audience_size counts an audience.';
        END LOOP;
    END IF;
    RETURN added.campaign_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean) IS
    'Creates a campaign: one notification to the sendable tokens of an audience. Returns its campaign_id. Give exactly one audience: tags (an expression, '
    'such as follows_RedSox && !muted: see tag_query), device_id, user_id, tokens (a long list goes into campaign_token), or everyone => true. payload, '
    'push_type, priority, expiration, collapse_id, scheduled_at: as in send_request. max_per_second: 1 to 1000000, by all daemons together. The daemons '
    'address the audience after COMMIT, and send. After expiration no more tokens are addressed, unsent requests fail, and the campaign ends. The '
    'campaign and its idempotency_key belong to the login role (session_user). The same key with the same content, including the list in campaign_token, '
    'returns the same campaign_id while the campaign is kept. A NOTICE says if no running daemon has a credential for the topic. Raises 25001 and 55000; '
    '22023 for what APNs would refuse, an expiration that has passed or is not later than scheduled_at, an unknown topic, none or several audiences, an '
    'invalid tag expression, tokens that cannot be read, an audience that needs confirm => true (see topic_policy.confirm_share), arguments over 16 MiB '
    'together, or a key used with other content; 23505 if another transaction has just used the key or the id: repeat the call.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_campaign_token() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wrong bigint;
BEGIN
    -- A CHECK would show the token in its message, and the server would log it.
    IF EXISTS (SELECT FROM added AS a WHERE tokenkeeper.token_key(a.token) IS NULL) THEN
        RAISE EXCEPTION '%', coalesce(tokenkeeper.unreadable(ARRAY(SELECT a.token FROM added AS a)), 'a token is null') USING ERRCODE = 'check_violation', TABLE = 'campaign_token',
            SCHEMA = 'tokenkeeper', COLUMN = 'token';
    END IF;
    -- Not what enqueue adds.
    INSERT INTO tokenkeeper.campaign_list (campaign_id, given_in)
    SELECT DISTINCT a.campaign_id, a.given_in FROM added AS a WHERE a.given_in IS NOT NULL
    ON CONFLICT DO NOTHING;
    SELECT n.campaign_id INTO wrong FROM (SELECT DISTINCT a.campaign_id FROM added AS a WHERE a.given_in IS NOT NULL) AS n
    WHERE NOT EXISTS (
        SELECT FROM tokenkeeper.campaign AS c
        WHERE c.campaign_id = n.campaign_id AND c.audience_kind = 'tokens'
          -- Or the repetition of a list.
          AND (c.created_in = pg_current_xact_id() OR (c.idempotency_key IS NOT NULL AND c.created_by = tokenkeeper.caller())))
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'campaign % does not take tokens', wrong USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Create it with tokens => ''{}'' in the same transaction.';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_campaign_token() IS
    'Trigger: only the transaction that creates a campaign with tokens, or one that repeats its list with its idempotency_key, may copy tokens to it. Has '
    'the list checked at COMMIT. Raises 55000 for any other campaign, and 23514 for a token that cannot be read.';

CREATE OR REPLACE FUNCTION tokenkeeper.close_campaign_list() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    c tokenkeeper.campaign;
    hash numeric;
    tokens bigint;
    fault text;
BEGIN
    SELECT a.* INTO c FROM tokenkeeper.campaign AS a WHERE a.campaign_id = new.campaign_id;
    -- Each token once, in any order; those given to enqueue count, too, but their content_hash says already which they are.
    SELECT count(*), sum(('x' || encode(substring(sha256(k.key) FOR 8), 'hex'))::bit(64)::bigint) FILTER (WHERE k.is_copied) INTO tokens, hash
    FROM (SELECT tokenkeeper.token_key(t.token) AS key, bool_or(t.given_in IS NOT NULL) AS is_copied FROM tokenkeeper.campaign_token AS t
          WHERE t.campaign_id = new.campaign_id
            AND (t.given_in = new.given_in OR (t.given_in IS NULL AND c.created_in = new.given_in)) GROUP BY 1) AS k;
    IF c.created_in = new.given_in THEN
        fault := CASE WHEN NOT c.is_confirmed THEN tokenkeeper.confirmation_fault(
            (SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = c.topic AND t.environment = c.environment), NULL, false, tokens) END;
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass confirm => true to enqueue.';
        END IF;
        UPDATE tokenkeeper.campaign AS a SET expected = tokens, copied_hash = hash WHERE a.campaign_id = new.campaign_id;
    ELSE
        IF c.copied_hash IS DISTINCT FROM hash THEN
            RAISE EXCEPTION 'idempotency_key % belongs to campaign %, which has another list of tokens', quote_literal(c.idempotency_key), new.campaign_id
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Use a new key for a new campaign.';
        END IF;
        DELETE FROM tokenkeeper.campaign_token AS t WHERE t.campaign_id = new.campaign_id AND t.given_in = new.given_in;
    END IF;
    DELETE FROM tokenkeeper.campaign_list AS l WHERE l.campaign_id = new.campaign_id AND l.given_in = new.given_in;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.close_campaign_list() IS
    'Trigger, at COMMIT: counts a list that was copied into campaign_token, and refuses it if it needs confirm => true; or compares it with the list that it '
    'repeats, and does not add it.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_campaign(campaign_id bigint) RETURNS tokenkeeper.campaign
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_one tokenkeeper.campaign;
BEGIN
    -- An older snapshot would not show what the daemons have returned meanwhile.
    IF tokenkeeper.isolation_fault() IS NOT NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.isolation_fault() USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    SELECT c.* INTO found_one FROM tokenkeeper.campaign AS c WHERE c.campaign_id = lock_campaign.campaign_id;
    -- Not the campaigns of others, which could be held up.
    IF FOUND AND tokenkeeper.may_manage_campaign(found_one.created_by) THEN
        -- Waits for addressing. Nothing that claims or finishes requests waits for this lock.
        SELECT c.* INTO found_one FROM tokenkeeper.campaign AS c WHERE c.campaign_id = lock_campaign.campaign_id FOR NO KEY UPDATE;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no campaign %', coalesce(lock_campaign.campaign_id::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Of the row that is locked: its number may have gone to another campaign meanwhile.
    IF NOT tokenkeeper.may_manage_campaign(found_one.created_by) THEN
        RAISE EXCEPTION 'campaign % belongs to %', lock_campaign.campaign_id, found_one.created_by USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN found_one;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_campaign(bigint) IS
    'Locks a campaign that the login role may manage. Raises 22023 for an unknown campaign, 42501 for the campaign of another role, 25001 unless READ '
    'COMMITTED.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_requests_of_campaign(campaign_id bigint, only_claimed boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Those that a daemon has claimed, too. Daemons skip what is locked. So each ending was either committed before, and the caller's next statement
    -- sees what it has changed; or it comes after the caller, and sees the new state of the campaign. Unless only_claimed, the same is true of claims.
    -- Batches before single requests, as in erase. Single requests come only from batches.
    PERFORM FROM tokenkeeper.campaign_batch AS b
    WHERE b.campaign_id = lock_requests_of_campaign.campaign_id
      AND b.batch >= (SELECT c.first_open_batch FROM tokenkeeper.campaign AS c WHERE c.campaign_id = lock_requests_of_campaign.campaign_id)
      AND (b.claimed_by IS NOT NULL OR NOT lock_requests_of_campaign.only_claimed)
    ORDER BY b.batch FOR UPDATE;
    PERFORM FROM tokenkeeper.send_request AS r
    WHERE r.campaign_id = lock_requests_of_campaign.campaign_id AND (r.claimed_by IS NOT NULL OR NOT lock_requests_of_campaign.only_claimed)
    ORDER BY r.request_id FOR UPDATE;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_requests_of_campaign(bigint, boolean) IS
    'Keeps daemons from claiming and finishing (with only_claimed: from finishing) requests of a campaign, which the caller has locked, until the '
    'transaction ends. Other campaigns go on.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_campaign(operation text, of_campaign tokenkeeper.campaign, requests bigint, more text DEFAULT NULL)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- The name is last, because forget removes what comes after the colon.
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    VALUES (note_campaign.operation, of_campaign.environment, of_campaign.topic, requests,
            'campaign ' || of_campaign.campaign_id::text || coalesce(', ' || note_campaign.more, '') || coalesce(': ' || of_campaign.name, ''))
$$;
COMMENT ON FUNCTION tokenkeeper.note_campaign(text, tokenkeeper.campaign, bigint, text) IS 'Logs an operation on a campaign, with more about it, if any.';

CREATE OR REPLACE FUNCTION tokenkeeper.pause_campaign(campaign_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    c tokenkeeper.campaign := tokenkeeper.lock_campaign(pause_campaign.campaign_id);
BEGIN
    IF c.state NOT IN ('waiting', 'running') THEN
        RETURN false;
    END IF;
    PERFORM tokenkeeper.lock_requests_of_campaign(c.campaign_id);
    UPDATE tokenkeeper.campaign AS p SET state = 'paused' WHERE p.campaign_id = c.campaign_id;
    -- Its single requests must not stand in the way of others of the topic.
    UPDATE tokenkeeper.send_request AS r SET scheduled_at = 'infinity', deferred = true
    WHERE r.campaign_id = c.campaign_id AND r.claimed_by IS NULL;
    PERFORM tokenkeeper.note_campaign('campaign_paused', c, NULL);
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.pause_campaign(bigint) IS
    'Pauses a campaign until resume_campaign, within a second after COMMIT; requests in flight end. Returns false if it is paused already, or has ended. '
    'Raises 25001; 22023 for an unknown campaign; 42501 for that of another login.';

CREATE OR REPLACE FUNCTION tokenkeeper.resume_campaign(campaign_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    c tokenkeeper.campaign := tokenkeeper.lock_campaign(resume_campaign.campaign_id);
BEGIN
    IF c.state <> 'paused' THEN
        RETURN false;
    END IF;
    PERFORM tokenkeeper.lock_requests_of_campaign(c.campaign_id);
    UPDATE tokenkeeper.campaign AS p SET state = CASE WHEN p.started_at IS NULL THEN 'waiting' ELSE 'running' END WHERE p.campaign_id = c.campaign_id;
    UPDATE tokenkeeper.send_request AS r SET scheduled_at = clock_timestamp()
    WHERE r.campaign_id = c.campaign_id AND r.claimed_by IS NULL AND r.scheduled_at = 'infinity';
    PERFORM tokenkeeper.note_campaign('campaign_resumed', c, NULL);
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.resume_campaign(bigint) IS
    'Ends the pause of a campaign. Returns false if it was not paused. Raises 22023, 42501 and 25001 as pause_campaign.';

CREATE OR REPLACE FUNCTION tokenkeeper.set_campaign_rate(campaign_id bigint, max_per_second integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    c tokenkeeper.campaign;
BEGIN
    IF set_campaign_rate.max_per_second NOT BETWEEN 1 AND 1000000 THEN
        RAISE EXCEPTION 'max_per_second is %, expected 1 to 1000000, or null', set_campaign_rate.max_per_second
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    c := tokenkeeper.lock_campaign(set_campaign_rate.campaign_id);
    IF c.state NOT IN ('waiting', 'running', 'paused') OR c.max_per_second IS NOT DISTINCT FROM set_campaign_rate.max_per_second THEN
        RETURN false;
    END IF;
    -- What is claimed keeps its slots, which are within the next second.
    UPDATE tokenkeeper.campaign AS p SET max_per_second = set_campaign_rate.max_per_second WHERE p.campaign_id = c.campaign_id;
    PERFORM tokenkeeper.note_campaign(
        'campaign_rate_set', c, NULL, 'max_per_second is ' || coalesce(set_campaign_rate.max_per_second::text, 'unlimited')
                                      || ', was ' || coalesce(c.max_per_second::text, 'unlimited'));
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.set_campaign_rate(bigint, integer) IS
    'Changes max_per_second of a campaign, within a second after COMMIT: 1 to 1000000, or null for no limit. Returns false if it has this rate, is '
    'cancelled, or has ended. Raises 22023 for another rate; 22023, 42501 and 25001 as pause_campaign.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_batches(of_campaign bigint, outcome text, most integer) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_bitmapscan = off
SET jit = off
AS $$
DECLARE
    word text COLLATE "C" := end_batches.outcome;
    requests bigint;
BEGIN
    -- In sets, and not one by one in failed_send: they may be a million, for one cause.
    WITH met AS MATERIALIZED (
        SELECT b.batch FROM tokenkeeper.campaign_batch AS b
        WHERE b.campaign_id = of_campaign AND b.claimed_by IS NULL
          AND b.batch >= (SELECT c.first_open_batch FROM tokenkeeper.campaign AS c WHERE c.campaign_id = of_campaign)
        ORDER BY b.batch LIMIT most FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM tokenkeeper.campaign_batch AS b USING met AS m WHERE b.campaign_id = of_campaign AND b.batch = m.batch
        RETURNING b.batch, ARRAY(SELECT o::smallint FROM generate_series(1, b.requests) AS o WHERE get_bit(b.ended, o) = 0) AS ordinals
    ), ended AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT of_campaign, g.batch, cardinality(g.ordinals), word, g.ordinals FROM gone AS g
    )
    SELECT coalesce(sum(cardinality(g.ordinals)), 0) INTO requests FROM gone AS g;
    RETURN requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_batches(bigint, text, integer) IS
    'Internal: ends what is left of the first unclaimed batches of a campaign, at most so many (null: all), without those that another transaction has '
    'locked. Returns how many requests it ended.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_waiting(of_campaign bigint, outcome text, most_batches integer) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    word text COLLATE "C" := end_waiting.outcome;
    in_batches bigint;
    given_back bigint;
    singles bigint;
BEGIN
    -- What waits. What a daemon has claimed ends when the daemon has noticed: see end_batched. A claim at this moment is noticed, too.
    PERFORM tokenkeeper.lock_requests_of_campaign(of_campaign, only_claimed => true);
    SELECT coalesce(sum(b.requests - bit_count(b.ended)), 0) INTO in_batches FROM tokenkeeper.campaign_batch AS b
    WHERE b.campaign_id = of_campaign AND b.claimed_by IS NULL;
    PERFORM tokenkeeper.end_batches(of_campaign, word, end_waiting.most_batches);
    -- What a daemon has returned waits, too, until it is done with the rest of the batch.
    WITH returned AS MATERIALIZED (
        SELECT b.batch, o FROM tokenkeeper.campaign_batch AS b CROSS JOIN LATERAL generate_series(1, b.requests) AS o
        WHERE b.campaign_id = of_campaign AND b.claimed_by IS NOT NULL AND get_bit(b.returned & ~b.ended, o) = 1
    ), ended AS MATERIALIZED (
        SELECT tokenkeeper.end_in_batches(array_agg(of_campaign), array_agg(r.batch), array_agg(r.o), array_agg(word))
        FROM returned AS r HAVING count(*) > 0
    )
    SELECT (SELECT count(*) FROM returned) INTO given_back FROM (SELECT count(*) FROM ended) AS done;
    WITH gone AS (
        DELETE FROM tokenkeeper.send_request AS r WHERE r.campaign_id = of_campaign AND r.claimed_by IS NULL
        RETURNING r.campaign_number
    ), ended AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT of_campaign, g.campaign_number >> 9, count(*), word, array_agg((g.campaign_number & 511)::smallint)
        FROM gone AS g GROUP BY g.campaign_number >> 9
    )
    SELECT count(*) INTO singles FROM gone AS g;
    RETURN in_batches + given_back + singles;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_waiting(bigint, text, integer) IS
    'Ends the waiting requests of a campaign, which the caller has locked and set to cancelled: of at most so many batches (null: all). end_campaigns ends '
    'the rest. Returns how many wait.';

CREATE OR REPLACE FUNCTION tokenkeeper.cancel_campaign(campaign_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    c tokenkeeper.campaign := tokenkeeper.lock_campaign(cancel_campaign.campaign_id);
BEGIN
    IF c.state NOT IN ('waiting', 'running', 'paused') THEN
        RETURN false;
    END IF;
    UPDATE tokenkeeper.campaign AS p SET state = 'cancelled', is_addressed = true, addressed_to = '' WHERE p.campaign_id = c.campaign_id;
    -- The daemons end the rest, so that this is over soon.
    PERFORM tokenkeeper.note_campaign('campaign_cancelled', c, tokenkeeper.end_waiting(c.campaign_id, 'cancelled', most_batches => 1000));
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.cancel_campaign(bigint) IS
    'Cancels a campaign for good, within a second after COMMIT; requests in flight end. Returns false if it is cancelled already, or has ended. Raises '
    '22023, 42501 and 25001 as pause_campaign.';

CREATE OR REPLACE FUNCTION tokenkeeper.delivery(apns_id uuid, OUT campaign_id bigint, OUT state text, OUT at timestamptz, OUT message text)
RETURNS SETOF record
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 1
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    wanted bigint;
    the_number bigint;
BEGIN
    SELECT r.campaign_id, r.number INTO wanted, the_number FROM tokenkeeper.campaign_request_of(delivery.apns_id) AS r;
    -- Numbers can be guessed.
    IF NOT EXISTS (SELECT FROM tokenkeeper.campaign AS c WHERE c.campaign_id = wanted
                   AND (c.created_by = tokenkeeper.caller() OR has_column_privilege(session_user, 'tokenkeeper.campaign', 'state', 'SELECT'))) THEN
        RETURN;
    END IF;
    RETURN QUERY
        SELECT e.campaign_id, e.outcome, e.ended_at,
               -- What had not been sent by then has no row in failed_send.
               coalesce(f.error, CASE WHEN e.outcome = 'failed' AND c.expiration > 'epoch' AND c.expiration <= e.ended_at
                                      THEN 'its expiration passed before it could be sent' END)
        FROM tokenkeeper.campaign_ending AS e
        JOIN tokenkeeper.campaign AS c ON c.campaign_id = e.campaign_id
        LEFT JOIN tokenkeeper.failed_send AS f
            ON e.outcome = 'failed' AND f.campaign_id = e.campaign_id AND f.campaign_number = the_number
        WHERE e.campaign_id = wanted AND e.batch = the_number >> 9 AND e.outcome <> 'requeued'
          AND (the_number & 511)::smallint = ANY (e.ordinals)
        LIMIT 1;
    IF FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY
        SELECT r.campaign_id, 'waiting'::text, nullif(r.scheduled_at, 'infinity'), r.last_error FROM tokenkeeper.send_request AS r
        WHERE r.campaign_id = wanted AND r.campaign_number = the_number LIMIT 1;
    IF FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY
        SELECT b.campaign_id, 'waiting'::text, NULL::timestamptz, NULL::text FROM tokenkeeper.campaign_batch AS b
        WHERE b.campaign_id = wanted AND b.batch = the_number >> 9 AND (the_number & 511) BETWEEN 1 AND b.requests
          AND get_bit(b.ended, (the_number & 511)::integer) = 0;
END
$$;
COMMENT ON FUNCTION tokenkeeper.delivery(uuid) IS
    'What became of a campaign''s request: its final outcome and when that was recorded, or waiting, and until when if it is retried. No row for an '
    'unknown apns-id, a campaign that the sweep has deleted and, to a sender, one of another login.';
