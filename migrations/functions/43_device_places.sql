-- One device, one token, when the device's tokens are on several shards. See docs/decisions/shards.md.
--
-- Call a registration's instant and token its naming. Each shard has its own latest naming of a device (L), the one that it has announced (A, not
-- later than L), and the latest on the other shards of which it has notice (E). Its latest token is superseded if E > L. A shard announces L if
-- A < E < L, or if the token of A is not that of L. The home gives notice to a shard if the latest of the others is later than its A and the
-- E it has is not, or if its E is no longer announced by anybody. Then, when all is delivered: let m be the shard with the greatest L. If another shard had
-- A > A(m), then A(m) < E(m) < L(m), and m would announce. So each other shard has A < A(m), hence A < E; and as it does not announce, E > L: its
-- tokens are superseded, and those of m are not. A registration of the current token at each launch of the app announces nothing: A and E stay.
--
-- Tags: each shard announces what the device's next token inherits from those here, that is device.tags and the changes of the device and its superseded
-- tokens. It does so at once, but what the current token has does not count yet. The home gives each shard notice of the latest tags of the
-- others, and of their changes. device_tags combines both.
--
-- A shard keeps its row of a device without tokens here, and so what it remembers, as long as the device has a token anywhere. Once the last one is deleted, the
-- home gives notice that the device ends.
--
-- Locks: devices, tokens, device_announcement, device_home, device_notice. What delivers a message holds many of these, so it skips what others hold.

CREATE OR REPLACE FUNCTION tokenkeeper.device_digest(device_id text) RETURNS bytea
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN substr(sha256(convert_to(device_id, 'UTF8')), 1, 16);
END
$$;
COMMENT ON FUNCTION tokenkeeper.device_digest(text) IS
    'The first 16 bytes of the SHA-256 of a device_id in UTF-8. It names the device in messages between shards, and remains for a day after the device is gone.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.device_digest(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.home_of(device_digest bytea, shards integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (get_byte(device_digest, 2) << 8 | get_byte(device_digest, 3)) & (shards - 1);
COMMENT ON FUNCTION tokenkeeper.home_of(bytea, integer) IS
    'The home of a device, a number of a shard: the first four bytes of its digest, most significant first, modulo shards, which is a power of two up to 1024.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.home_of(bytea, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.is_announced(of_topic integer, device text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM tokenkeeper.shard) AND EXISTS (
        SELECT FROM tokenkeeper.device_announcement AS a
        WHERE a.topic_id = of_topic AND a.device_digest = tokenkeeper.device_digest(device) AND a.device_id IS NOT NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.is_announced(integer, text) IS
    'Whether a device may have tokens on other shards. What deletes its last token here then leaves its row of device: the device''s home says when it ends.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.is_announced(integer, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.announce_device(of_topic integer, device text, decides boolean, deletes boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    this text COLLATE "C" := device;
    digest bytea := tokenkeeper.device_digest(device);
    own tokenkeeper.shard;
    was tokenkeeper.device_announcement;
    new tokenkeeper.device_announcement;
    has_device boolean;
    place tokenkeeper.device_place;
    known_version bigint;
BEGIN
    SELECT s.* INTO own FROM tokenkeeper.shard AS s;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT a.* INTO was FROM tokenkeeper.device_announcement AS a WHERE a.topic_id = of_topic AND a.device_digest = digest FOR NO KEY UPDATE;
    new := was;
    SELECT d.named_at, d.token_key, d.tags_at, d.tags,
           CASE WHEN d.tag_changes IS NOT NULL OR c.changes <> '{}' THEN tokenkeeper.latest_tag_changes(d.tag_changes || c.changes, NULL) END
    INTO new.named_at, new.token_key, new.tags_at, new.tags, new.tag_changes
    FROM tokenkeeper.device AS d CROSS JOIN LATERAL (SELECT ARRAY(
        SELECT c FROM tokenkeeper.ledger AS l CROSS JOIN LATERAL unnest(l.tag_changes) AS c
        WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.tag_changes IS NOT NULL AND l.superseded_at IS NOT NULL) AS changes) AS c
    WHERE d.topic_id = of_topic AND d.device_id = this;
    has_device := FOUND;
    IF has_device THEN
        new.has_tokens := EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = this AND l.topic_id + 0 = of_topic);
        -- As in lock_devices: the tokens that are not superseded, and the latest of the others.
        SELECT w.at, w.token_key INTO new.named_at, new.token_key FROM (
            SELECT new.named_at AS at, new.token_key
            UNION ALL
            SELECT l.registered_at, l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL
            UNION ALL
            (SELECT l.registered_at, l.token_key FROM tokenkeeper.ledger AS l
             WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NOT NULL
             ORDER BY l.superseded_at DESC, l.token_key DESC LIMIT 1)) AS w
        ORDER BY w.at DESC, w.token_key DESC LIMIT 1;
        IF was.device_id IS NULL THEN
            IF new.token_key = '' THEN
                RETURN;
            END IF;
        ELSIF new.token_key = was.token_key AND (new.named_at, new.token_key) >= (was.named_at, was.token_key)
            AND NOT ((was.named_at, was.token_key) < (was.elsewhere_at, was.elsewhere_key)
                     AND (was.elsewhere_at, was.elsewhere_key) < (new.named_at, new.token_key))
            AND NOT (coalesce(announce_device.decides, false) AND was.is_lowered)
            -- The home then asks whether the device has tokens anywhere.
            AND (new.has_tokens OR NOT announce_device.deletes)
            AND (new.has_tokens, new.tags_at, new.tags, new.tag_changes) IS NOT DISTINCT FROM (was.has_tokens, was.tags_at, was.tags, was.tag_changes) THEN
            RETURN;
        END IF;
    ELSIF was.device_id IS NULL THEN
        RETURN;
    END IF;

    IF decides IS NULL AND has_device AND (new.named_at, new.token_key) < (was.named_at, was.token_key) THEN
        -- A token has been deleted, and the tags are changed before check_next_devices has announced that.
        decides := false;
    END IF;
    new.version := greatest(was.version + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    new.decides := tokenkeeper.decides_after(CASE WHEN was.is_pending THEN was.decides END, announce_device.decides);
    new.deletes := announce_device.deletes OR (coalesce(was.is_pending, false) AND was.deletes);
    new.is_lowered := coalesce(NOT announce_device.decides, was.is_lowered, false);
    new.home := tokenkeeper.home_of(digest, own.shards);
    new.is_pending := new.home <> own.number;
    IF was.device_id IS NULL THEN
        new.generation := new.version;
        new.elsewhere_at := '-infinity';
        new.elsewhere_key := '';
        new.elsewhere_tags_at := NULL;
        new.elsewhere_tags := NULL;
        new.elsewhere_changes := NULL;
        new.notice_version := 0;
    END IF;
    IF NOT has_device THEN
        new.named_at := '-infinity';
        new.token_key := '';
        new.has_tokens := false;
        new.tags_at := NULL;
        new.tags := NULL;
        new.tag_changes := NULL;
    END IF;
    place.shard := own.number;
    place.version := new.version;
    place.generation := new.generation;
    place.named_at := new.named_at;
    place.token_key := new.token_key;
    place.has_tokens := new.has_tokens;
    place.tags_at := new.tags_at;
    place.tags := new.tags;
    place.tag_changes := new.tag_changes;
    IF NOT new.is_pending THEN
        LOOP
            known_version := tokenkeeper.receive_announcement(
                of_topic, digest, CASE WHEN has_device THEN this END, place, new.decides, new.deletes, true);
            EXIT WHEN known_version = new.version;
            -- The clock was set back while the device was away.
            new.version := known_version + 1;
            place.version := new.version;
            IF was.device_id IS NULL THEN
                new.generation := new.version;
                place.generation := new.version;
            END IF;
        END LOOP;
        IF NOT has_device THEN
            DELETE FROM tokenkeeper.device_announcement AS a WHERE a.topic_id = of_topic AND a.device_digest = digest;
            RETURN;
        END IF;
    END IF;
    INSERT INTO tokenkeeper.device_announcement AS a (topic_id, device_digest, device_id, home, named_at, token_key, version, generation, is_pending, decides,
        deletes, is_lowered, has_tokens, tags_at, tags, tag_changes,
        elsewhere_at, elsewhere_key, elsewhere_tags_at, elsewhere_tags, elsewhere_changes, notice_version)
    VALUES (of_topic, digest, CASE WHEN has_device THEN this END, new.home, new.named_at, new.token_key, new.version, new.generation, new.is_pending,
        CASE WHEN new.is_pending THEN new.decides ELSE false END, new.deletes AND new.is_pending, new.is_lowered, new.has_tokens, new.tags_at, new.tags,
        new.tag_changes, new.elsewhere_at, new.elsewhere_key, new.elsewhere_tags_at, new.elsewhere_tags, new.elsewhere_changes, new.notice_version)
    ON CONFLICT ON CONSTRAINT device_announcement_pkey DO UPDATE
    SET device_id = excluded.device_id, named_at = excluded.named_at, token_key = excluded.token_key, version = excluded.version,
        generation = excluded.generation, is_pending = excluded.is_pending, decides = excluded.decides,
        deletes = excluded.deletes, is_lowered = excluded.is_lowered, has_tokens = excluded.has_tokens,
        tags_at = excluded.tags_at, tags = excluded.tags, tag_changes = excluded.tag_changes,
        elsewhere_at = excluded.elsewhere_at, elsewhere_key = excluded.elsewhere_key, elsewhere_tags_at = excluded.elsewhere_tags_at,
        elsewhere_tags = excluded.elsewhere_tags, elsewhere_changes = excluded.elsewhere_changes, notice_version = excluded.notice_version;
END
$$;
COMMENT ON FUNCTION tokenkeeper.announce_device(integer, text, boolean, boolean) IS
    'Stores an announcement to the device''s home if the other shards have to know what has changed here; does nothing in a database that is not a shard. '
    'The caller holds the device and has changed its tokens or tags. decides and deletes are as in device_announcement.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.announce_device(integer, text, boolean, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.decides_after(before boolean, decides boolean) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(before OR decides, before, decides);
COMMENT ON FUNCTION tokenkeeper.decides_after(boolean, boolean) IS
    'What is left to decide of two messages, of which the second replaces the first: true if one of them is, otherwise false if one is.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.decides_after(boolean, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.without_notices(place tokenkeeper.device_place) RETURNS tokenkeeper.device_place
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    place.elsewhere_at := '-infinity';
    place.elsewhere_key := '';
    place.elsewhere_tags_at := NULL;
    place.elsewhere_tags := NULL;
    place.elsewhere_changes := NULL;
    place.is_lowered := false;
    RETURN place;
END
$$;
COMMENT ON FUNCTION tokenkeeper.without_notices(tokenkeeper.device_place) IS 'A place of which the home has given notice of nothing.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.without_notices(tokenkeeper.device_place) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.receive_announcement(
    of_topic integer, digest bytea, device text, announced tokenkeeper.device_place, decides boolean, deletes boolean, waits boolean) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    home tokenkeeper.device_home;
    new_places tokenkeeper.device_place[];
    place tokenkeeper.device_place;
    latest tokenkeeper.device_place;
    is_known boolean := false;
    is_announced boolean;
    has_tags boolean;
    ends boolean;
    notice_version bigint;
BEGIN
    LOOP
        IF waits THEN
            SELECT h.* INTO home FROM tokenkeeper.device_home AS h WHERE h.topic_id = of_topic AND h.device_digest = digest FOR NO KEY UPDATE;
        ELSE
            SELECT h.* INTO home FROM tokenkeeper.device_home AS h WHERE h.topic_id = of_topic AND h.device_digest = digest FOR NO KEY UPDATE SKIP LOCKED;
        END IF;
        EXIT WHEN FOUND;
        IF NOT waits AND EXISTS (SELECT FROM tokenkeeper.device_home AS h WHERE h.topic_id = of_topic AND h.device_digest = digest) THEN
            RETURN NULL;
        END IF;
        INSERT INTO tokenkeeper.device_home (topic_id, device_digest) VALUES (of_topic, digest) ON CONFLICT DO NOTHING;
    END LOOP;

    new_places := '{}';
    FOREACH place IN ARRAY home.places LOOP
        IF place.shard = announced.shard THEN
            IF place.version >= announced.version THEN
                RETURN place.version;
            END IF;
            is_known := true;
            announced.notice_version := place.notice_version;
            IF place.generation = announced.generation AND device IS NOT NULL THEN
                announced.elsewhere_at := place.elsewhere_at;
                announced.elsewhere_key := place.elsewhere_key;
                announced.elsewhere_tags_at := place.elsewhere_tags_at;
                announced.elsewhere_tags := place.elsewhere_tags;
                announced.elsewhere_changes := place.elsewhere_changes;
                announced.is_lowered := place.is_lowered;
            ELSE
                announced := tokenkeeper.without_notices(announced);
            END IF;
            announced.is_gone := device IS NULL;
            place := announced;
        END IF;
        new_places := new_places || place;
    END LOOP;
    IF NOT is_known THEN
        announced := tokenkeeper.without_notices(announced);
        announced.notice_version := 0;
        announced.is_gone := device IS NULL;
        new_places := new_places || announced;
    END IF;
    IF device IS NULL THEN
        DELETE FROM tokenkeeper.device_notice AS n WHERE n.topic_id = of_topic AND n.to_shard = announced.shard AND n.device_digest = digest;
    END IF;
    ends := deletes AND NOT EXISTS (SELECT FROM unnest(new_places) AS p WHERE p.has_tokens);
    has_tags := EXISTS (SELECT FROM unnest(new_places) AS p
                        WHERE num_nonnulls(p.tags_at, p.tag_changes, p.elsewhere_tags_at, p.elsewhere_changes) > 0);

    FOR n IN 1..cardinality(new_places) LOOP
        place := new_places[n];
        CONTINUE WHEN place.is_gone;
        SELECT p.* INTO latest FROM unnest(new_places) AS p
        WHERE p.shard <> place.shard AND p.token_key <> '' ORDER BY p.named_at DESC, p.token_key DESC LIMIT 1;
        IF latest.token_key IS NULL THEN
            latest.named_at := '-infinity';
            latest.token_key := '';
        END IF;
        latest.elsewhere_tags_at := NULL;
        latest.elsewhere_tags := NULL;
        latest.elsewhere_changes := NULL;
        -- Without tokens, a shard needs no tags, and keeps none that may be forgotten meanwhile.
        IF has_tags AND place.has_tokens THEN
            SELECT p.tags_at, p.tags INTO latest.elsewhere_tags_at, latest.elsewhere_tags FROM unnest(new_places) AS p
            WHERE p.shard <> place.shard AND p.tags_at IS NOT NULL ORDER BY p.tags_at DESC, p.tags DESC LIMIT 1;
            latest.elsewhere_changes := tokenkeeper.latest_tag_changes(ARRAY(
                SELECT c FROM unnest(new_places) AS p CROSS JOIN LATERAL unnest(p.tag_changes) AS c WHERE p.shard <> place.shard), NULL);
        END IF;
        is_announced := place.elsewhere_key = '' OR EXISTS (
            SELECT FROM unnest(new_places) AS p WHERE p.shard <> place.shard AND p.token_key = place.elsewhere_key);
        IF NOT is_announced
            OR (place.elsewhere_at, place.elsewhere_key) > (latest.named_at, latest.token_key)
            OR ((latest.named_at, latest.token_key) > (place.named_at, place.token_key)
                AND (place.elsewhere_at, place.elsewhere_key) < (place.named_at, place.token_key))
            -- The other shards of a device of which a token was deleted: now to know that, and to decide with the next registration.
            OR (place.shard <> announced.shard AND (NOT receive_announcement.decides OR (receive_announcement.decides AND place.is_lowered)))
            OR (place.elsewhere_tags_at, place.elsewhere_tags, place.elsewhere_changes)
                IS DISTINCT FROM (latest.elsewhere_tags_at, latest.elsewhere_tags, latest.elsewhere_changes)
            OR ends THEN
            notice_version := greatest(place.notice_version + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
            place.elsewhere_at := latest.named_at;
            place.elsewhere_key := latest.token_key;
            place.elsewhere_tags_at := latest.elsewhere_tags_at;
            place.elsewhere_tags := latest.elsewhere_tags;
            place.elsewhere_changes := latest.elsewhere_changes;
            place.notice_version := notice_version;
            INSERT INTO tokenkeeper.device_notice AS o (topic_id, to_shard, device_digest, version, generation, elsewhere_at, elsewhere_key,
                elsewhere_tags_at, elsewhere_tags, elsewhere_changes, decides, ends)
            VALUES (of_topic, place.shard, digest, notice_version, place.generation, place.elsewhere_at, place.elsewhere_key,
                place.elsewhere_tags_at, place.elsewhere_tags, place.elsewhere_changes, receive_announcement.decides, ends)
            ON CONFLICT ON CONSTRAINT device_notice_pkey DO UPDATE
            SET version = excluded.version, elsewhere_at = excluded.elsewhere_at, elsewhere_key = excluded.elsewhere_key,
                elsewhere_tags_at = excluded.elsewhere_tags_at, elsewhere_tags = excluded.elsewhere_tags, elsewhere_changes = excluded.elsewhere_changes,
                decides = tokenkeeper.decides_after(CASE WHEN o.generation = excluded.generation THEN o.decides END, excluded.decides),
                -- Until it is delivered: another shard that forgets the device announces that, too, and nothing else says that it ends.
                ends = excluded.ends OR (o.ends AND o.generation = excluded.generation AND NOT EXISTS (SELECT FROM unnest(new_places) AS p WHERE p.has_tokens)),
                generation = excluded.generation;
        END IF;
        place.is_lowered := coalesce(NOT receive_announcement.decides, place.is_lowered);
        new_places[n] := place;
    END LOOP;
    UPDATE tokenkeeper.device_home AS h
    SET places = new_places, device_id = g.device_id, gone_at = CASE WHEN g.device_id IS NULL THEN clock_timestamp() END
    FROM (SELECT CASE WHEN EXISTS (SELECT FROM unnest(new_places) AS p WHERE NOT p.is_gone) THEN coalesce(device, home.device_id) END
              AS device_id) AS g
    WHERE h.topic_id = of_topic AND h.device_digest = digest;
    RETURN announced.version;
END
$$;
COMMENT ON FUNCTION tokenkeeper.receive_announcement(integer, bytea, text, tokenkeeper.device_place, boolean, boolean, boolean) IS
    'What the home does with an announcement: records it, and stores the notices for shards to which it matters. The device is null if it has left that shard; '
    'of the place, the fields count that are in device_announcement, without those of notices. '
    'Returns the version of that shard that it has now: a greater one than was given if it has a later announcement; null if another session holds the device '
    'and the caller does not want to wait.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.receive_announcement(integer, bytea, text, tokenkeeper.device_place, boolean, boolean, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.receive_notice(of_topic integer, notice tokenkeeper.device_notice) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    was tokenkeeper.device_announcement;
    busy bytea;
    tokens bytea[];
    has_changes boolean;
    decides boolean;
BEGIN
    SELECT a.* INTO was FROM tokenkeeper.device_announcement AS a WHERE a.topic_id = of_topic AND a.device_digest = notice.device_digest;
    IF was.device_id IS NULL OR was.generation <> notice.generation OR was.notice_version >= notice.version THEN
        RETURN true;
    END IF;
    BEGIN
        PERFORM FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = was.device_id FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            -- Locked; or its last token was deleted, which is announced next.
            RETURN NOT EXISTS (SELECT FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = was.device_id);
        END IF;
        SELECT d.busy, d.tokens INTO busy, tokens FROM tokenkeeper.lock_devices(of_topic, ARRAY[was.device_id], ''::bytea) AS d;
        IF busy IS NOT NULL THEN
            RAISE EXCEPTION 'a token of the device is locked' USING ERRCODE = 'TK001';
        END IF;
        UPDATE tokenkeeper.device_announcement AS a
        SET elsewhere_at = notice.elsewhere_at, elsewhere_key = notice.elsewhere_key, elsewhere_tags_at = notice.elsewhere_tags_at,
            elsewhere_tags = notice.elsewhere_tags, elsewhere_changes = notice.elsewhere_changes, notice_version = notice.version,
            is_lowered = coalesce(NOT notice.decides, a.is_lowered)
        WHERE a.topic_id = of_topic AND a.device_digest = notice.device_digest AND a.device_id IS NOT NULL AND a.generation = notice.generation
          AND a.notice_version < notice.version
        -- Any notice may be the first to tell of a later registration, which supersedes the device's token here. If there is none, to decide
        -- could only revive one.
        RETURNING coalesce(notice.decides, false)
            OR ((notice.elsewhere_at, notice.elsewhere_key) > (was.elsewhere_at, was.elsewhere_key) AND EXISTS (
                SELECT FROM tokenkeeper.ledger AS l
                WHERE l.device_id = was.device_id AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL)) INTO decides;
        IF NOT FOUND THEN
            RETURN true;
        END IF;
        IF notice.ends AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = was.device_id AND l.topic_id + 0 = of_topic) THEN
            DELETE FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = was.device_id;
        ELSE
            has_changes := tokenkeeper.without_tag_changes(of_topic, tokens, ARRAY[was.device_id]);
            IF decides THEN
                PERFORM tokenkeeper.update_device(of_topic, was.device_id, ''::bytea, tokens, clock_timestamp());
            ELSE
                PERFORM tokenkeeper.inherit_tags(of_topic, was.device_id, tokens);
            END IF;
            IF has_changes THEN
                PERFORM tokenkeeper.apply_tag_changes(of_topic, tokens);
            END IF;
        END IF;
        PERFORM tokenkeeper.announce_device(of_topic, was.device_id, notice.decides);
        RETURN true;
    EXCEPTION WHEN SQLSTATE 'TK001' THEN
        RETURN false;
    END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.receive_notice(integer, tokenkeeper.device_notice) IS
    'What a shard does with a notice from a device''s home: decides again which of its tokens are superseded and what tags they have, or forgets a device that ends. '
    'Returns false if another session holds the device or one '
    'of its tokens; true also for a notice that does not count any more.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.receive_notice(integer, tokenkeeper.device_notice) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.device_messages(to_shard integer, after bytea DEFAULT '', max_messages integer DEFAULT 500) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET bytea_output = 'hex'
AS $$
DECLARE
    at_most integer := greatest(max_messages, 1);
    messages jsonb;
BEGIN
    -- Two queries, so that each reads its index in order.
    WITH due AS (
        (SELECT a.topic_id, a.device_digest, jsonb_strip_nulls(to_jsonb(a) - '{elsewhere_tags_at,elsewhere_tags,elsewhere_changes}'::text[])
                || '{"kind": "announcement"}' AS message
         FROM tokenkeeper.device_announcement AS a
         WHERE a.is_pending AND a.home = device_messages.to_shard AND a.device_digest > device_messages.after
         ORDER BY a.device_digest LIMIT at_most)
        UNION ALL
        (SELECT n.topic_id, n.device_digest, jsonb_strip_nulls(to_jsonb(n)) || '{"kind": "notice"}' FROM tokenkeeper.device_notice AS n
         WHERE n.to_shard = device_messages.to_shard AND n.device_digest > device_messages.after
         ORDER BY n.device_digest LIMIT at_most)
    ), next AS (
        SELECT d.device_digest, jsonb_build_object('environment', t.environment, 'topic', t.topic) || d.message AS message
        FROM due AS d JOIN tokenkeeper.topic AS t ON t.topic_id = d.topic_id
        ORDER BY d.device_digest FETCH FIRST at_most ROWS WITH TIES
    ), sized AS (
        SELECT n.*, sum(b.bytes) OVER (ORDER BY n.device_digest) - sum(b.bytes) OVER (PARTITION BY n.device_digest) AS bytes_before
        FROM next AS n CROSS JOIN LATERAL (SELECT pg_column_size(n.message) AS bytes) AS b
    )
    -- Tags can be long. The messages about one device stay together.
    SELECT jsonb_agg(s.message ORDER BY s.device_digest) INTO messages FROM sized AS s WHERE s.bytes_before < 4000000;
    RETURN (SELECT jsonb_build_object('from', s.number, 'to', device_messages.to_shard, 'shards', s.shards, 'messages', messages)
            FROM tokenkeeper.shard AS s WHERE messages IS NOT NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.device_messages(integer, bytea, integer) IS
    'The next messages about devices for another shard, or for this one, as an argument of receive_device_messages there: about max_messages and about 4 MB at most, of devices '
    'whose digest is after the one given, in that order. Null if there is none.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.device_messages(integer, bytea, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.device_message_targets() RETURNS SETOF integer
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    own tokenkeeper.shard;
BEGIN
    SELECT s.* INTO own FROM tokenkeeper.shard AS s;
    FOR n IN 0..coalesce(own.shards, 0) - 1 LOOP
        PERFORM FROM tokenkeeper.device_announcement AS a WHERE a.is_pending AND a.home = n LIMIT 1;
        IF NOT FOUND THEN
            PERFORM FROM tokenkeeper.device_notice AS o WHERE o.to_shard = n LIMIT 1;
        END IF;
        IF FOUND THEN
            RETURN NEXT n;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.device_message_targets() IS 'The numbers of the shards for which device_messages has something.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.device_message_targets() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.receive_device_messages(package jsonb) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET bytea_output = 'hex'
SET lock_timeout = '100ms'
AS $$
DECLARE
    own tokenkeeper.shard;
    message record;
    of_topic integer;
    known_version bigint;
    receipts jsonb := '[]';
BEGIN
    SELECT s.* INTO own FROM tokenkeeper.shard AS s;
    IF (own.number, own.shards) IS DISTINCT FROM ((package ->> 'to')::integer, (package ->> 'shards')::integer) THEN
        RAISE EXCEPTION 'this database is %, and the messages are for shard % of %', coalesce('shard ' || own.number || ' of ' || own.shards, 'no shard'),
            package ->> 'to', package ->> 'shards' USING ERRCODE = 'invalid_parameter_value', HINT = 'The shard maps of the daemons differ.';
    END IF;
    FOR message IN
        SELECT m.*, p.value AS fields FROM jsonb_array_elements(package -> 'messages') AS p (value)
        CROSS JOIN LATERAL jsonb_to_record(p.value) AS m (
            kind text, environment text, topic text, device_digest bytea, device_id text, version bigint, decides boolean, deletes boolean)
        ORDER BY m.environment, m.topic, m.device_digest
    LOOP
        SELECT t.topic_id INTO of_topic FROM tokenkeeper.topic AS t WHERE t.topic = message.topic COLLATE "C" AND t.environment = message.environment COLLATE "C";
        IF message.kind = 'announcement' THEN
            BEGIN
                -- Another session may be adding the topic or the device, and an INSERT would wait for it.
                PERFORM set_config('lock_timeout', '3ms', true);
                of_topic := coalesce(of_topic, tokenkeeper.ensure_topic(message.environment, message.topic));
                known_version := tokenkeeper.receive_announcement(
                    of_topic, message.device_digest, message.device_id,
                    jsonb_populate_record(NULL::tokenkeeper.device_place, message.fields || jsonb_build_object('shard', package -> 'from')),
                    message.decides, message.deletes, false);
            EXCEPTION WHEN lock_not_available THEN
                CONTINUE;
            END;
            CONTINUE WHEN known_version IS NULL;
        ELSE
            known_version := message.version;
            BEGIN
                PERFORM set_config('lock_timeout', '3ms', true);
                -- A notice about a topic that has no token here any more does not count.
                CONTINUE WHEN of_topic IS NOT NULL
                    AND NOT tokenkeeper.receive_notice(of_topic, jsonb_populate_record(NULL::tokenkeeper.device_notice, message.fields));
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                CONTINUE;
            END;
        END IF;
        receipts := receipts || jsonb_build_object(
            'kind', message.kind, 'environment', message.environment, 'topic', message.topic, 'device_digest', message.device_digest, 'version', message.version,
            'known_version', known_version);
    END LOOP;
    RETURN jsonb_build_object('to', own.number, 'receipts', receipts);
END
$$;
COMMENT ON FUNCTION tokenkeeper.receive_device_messages(jsonb) IS
    'Applies what device_messages returned on another shard. Returns the receipts for acknowledge_device_messages there: not for messages whose device, or one of its '
    'tokens, another session holds; these come again. Raises 22023 if they are for another shard, or for another number of shards.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.receive_device_messages(jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.acknowledge_device_messages(package jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    receipt record;
    place tid;
    acknowledged bigint := 0;
BEGIN
    FOR receipt IN
        SELECT t.topic_id, r.* FROM jsonb_to_recordset(package -> 'receipts') AS r (
            kind text, environment text, topic text, device_digest bytea, version bigint, known_version bigint)
        JOIN tokenkeeper.topic AS t ON t.topic = r.topic COLLATE "C" AND t.environment = r.environment COLLATE "C"
    LOOP
        -- What another session holds is delivered once more.
        IF receipt.kind = 'notice' THEN
            SELECT n.ctid INTO place FROM tokenkeeper.device_notice AS n
            WHERE n.topic_id = receipt.topic_id AND n.to_shard = (package ->> 'to')::integer AND n.device_digest = receipt.device_digest
              AND n.version = receipt.version FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            DELETE FROM tokenkeeper.device_notice AS n WHERE n.ctid = place;
        ELSE
            SELECT a.ctid INTO place FROM tokenkeeper.device_announcement AS a
            WHERE a.topic_id = receipt.topic_id AND a.device_digest = receipt.device_digest AND a.is_pending AND a.version = receipt.version
            FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            IF receipt.known_version > receipt.version THEN
                -- The home remembers a later announcement: the clock was set back while the device was away. Once more, with a later version.
                UPDATE tokenkeeper.device_announcement AS a SET version = receipt.known_version + 1, generation = receipt.known_version + 1,
                    elsewhere_at = '-infinity', elsewhere_key = '', elsewhere_tags_at = NULL, elsewhere_tags = NULL, elsewhere_changes = NULL, notice_version = 0
                WHERE a.ctid = place;
                CONTINUE;
            END IF;
            DELETE FROM tokenkeeper.device_announcement AS a WHERE a.ctid = place AND a.device_id IS NULL;
            UPDATE tokenkeeper.device_announcement AS a SET is_pending = false, decides = false, deletes = false WHERE a.ctid = place AND a.device_id IS NOT NULL;
        END IF;
        acknowledged := acknowledged + 1;
    END LOOP;
    RETURN acknowledged;
END
$$;
COMMENT ON FUNCTION tokenkeeper.acknowledge_device_messages(jsonb) IS
    'Notes what receive_device_messages returned on another shard: those messages are not sent again, unless they have changed since. Returns how many.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.acknowledge_device_messages(jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.check_devices() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    IF EXISTS (SELECT FROM tokenkeeper.shard) THEN
        INSERT INTO tokenkeeper.device_check (topic_id, device_digest)
        SELECT DISTINCT g.topic_id, tokenkeeper.device_digest(g.device_id) FROM gone AS g WHERE g.device_id IS NOT NULL;
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_devices() IS 'A trigger: notes in device_check the devices of tokens that are deleted on a shard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.check_devices() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.check_next_devices(max_rows integer DEFAULT 500) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    due record;
    device text COLLATE "C";
    checked bigint := 0;
BEGIN
    FOR due IN
        SELECT c.ctid AS place, c.topic_id, c.device_digest FROM tokenkeeper.device_check AS c LIMIT greatest(max_rows, 1) FOR UPDATE SKIP LOCKED
    LOOP
        SELECT a.device_id INTO device FROM tokenkeeper.device_announcement AS a WHERE a.topic_id = due.topic_id AND a.device_digest = due.device_digest;
        IF device IS NOT NULL THEN
            PERFORM FROM tokenkeeper.device AS d WHERE d.topic_id = due.topic_id AND d.device_id = device FOR NO KEY UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                CONTINUE WHEN EXISTS (SELECT FROM tokenkeeper.device AS d WHERE d.topic_id = due.topic_id AND d.device_id = device);
                -- It is gone. An application that adds it again waits for no row here.
                PERFORM FROM tokenkeeper.device_announcement AS a WHERE a.topic_id = due.topic_id AND a.device_digest = due.device_digest
                FOR NO KEY UPDATE SKIP LOCKED;
                CONTINUE WHEN NOT FOUND;
            END IF;
            PERFORM tokenkeeper.announce_device(due.topic_id, device, false, true);
        END IF;
        DELETE FROM tokenkeeper.device_check AS c WHERE c.ctid = due.place;
        checked := checked + 1;
    END LOOP;
    RETURN checked;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_next_devices(integer) IS
    'Announces what the next devices in device_check have lost, up to max_rows. Returns how many: those that another session holds remain.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.check_next_devices(integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.delete_gone_devices(gone_before timestamptz, max_rows integer DEFAULT 4000) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    deleted bigint;
BEGIN
    DELETE FROM tokenkeeper.device_home AS h WHERE h.ctid = ANY (ARRAY(
        SELECT g.ctid FROM tokenkeeper.device_home AS g WHERE g.gone_at < delete_gone_devices.gone_before
        ORDER BY g.gone_at LIMIT greatest(max_rows, 1) FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$$;
COMMENT ON FUNCTION tokenkeeper.delete_gone_devices(timestamptz, integer) IS
    'Deletes what a home remembers of devices that left all shards before an instant: no message about them is under way any more. Returns how many.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.delete_gone_devices(timestamptz, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.forget_home(of_device text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    digest bytea := tokenkeeper.device_digest(of_device);
BEGIN
    DELETE FROM tokenkeeper.device_notice AS n USING tokenkeeper.topic AS t, tokenkeeper.shard AS s
    WHERE n.topic_id = t.topic_id AND n.to_shard BETWEEN 0 AND s.shards - 1 AND n.device_digest = digest;
    -- The versions stay for a day, without the device, so that no late message brings it back.
    UPDATE tokenkeeper.device_home AS h
    SET device_id = NULL, gone_at = coalesce(h.gone_at, clock_timestamp()), places = ARRAY(
        SELECT jsonb_populate_record(NULL::tokenkeeper.device_place, jsonb_build_object(
            'shard', p.shard, 'version', p.version, 'generation', p.generation, 'named_at', '-infinity', 'token_key', '', 'has_tokens', false,
            'elsewhere_at', '-infinity', 'elsewhere_key', '', 'notice_version', p.notice_version, 'is_lowered', false, 'is_gone', true))
        FROM unnest(h.places) AS p)
    FROM tokenkeeper.topic AS t WHERE h.topic_id = t.topic_id AND h.device_digest = digest;
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_home(text) IS 'The part of erase that concerns a device whose home is this shard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget_home(text) FROM PUBLIC;
