-- A step of apply_registrations (23): what concerns other tokens of a device, row by row.

CREATE OR REPLACE FUNCTION tokenkeeper.register_row(
    of_topic integer, key bytea, moment timestamptz, device text, new_tags text[], new_user text, details_at timestamptz, from_source bigint,
    receipt timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    token text := encode(key, 'hex');
    scope tokenkeeper.topic;
    has_changes boolean;
    is_superseded boolean;
BEGIN
    SELECT t.* INTO scope FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    IF details_at = moment THEN
        PERFORM tokenkeeper.register(token, scope.topic, scope.environment, moment, device, new_tags, new_user);
    ELSE
        PERFORM tokenkeeper.register(token, scope.topic, scope.environment, moment, device);
        has_changes := new_tags IS NOT NULL AND tokenkeeper.without_tag_changes(of_topic, ARRAY[key], '{}');
        UPDATE tokenkeeper.ledger AS l
        SET user_id = CASE WHEN s.user_moves THEN nullif(new_user, '') ELSE l.user_id END,
            user_at = CASE WHEN s.user_moves THEN details_at ELSE l.user_at END,
            tags = CASE WHEN s.tags_move THEN new_tags ELSE l.tags END,
            tags_at = CASE WHEN s.tags_move THEN details_at ELSE l.tags_at END
        FROM (SELECT k.ctid AS place,
                     new_user IS NOT NULL
                         AND (k.user_at IS NULL OR (details_at, new_user COLLATE "C") > (k.user_at, coalesce(k.user_id, ''))) AS user_moves,
                     new_tags IS NOT NULL AND (k.tags_at IS NULL OR (details_at, new_tags COLLATE "C") > (k.tags_at, k.tags)) AS tags_move
              FROM tokenkeeper.ledger AS k WHERE k.topic_id = of_topic AND k.token_key = key OFFSET 0) AS s
        WHERE l.ctid = s.place AND (s.user_moves OR s.tags_move)
        RETURNING l.superseded_at IS NOT NULL AND s.tags_move INTO is_superseded;
        IF has_changes THEN
            PERFORM tokenkeeper.apply_tag_changes(of_topic, ARRAY[key]);
        END IF;
        IF is_superseded THEN
            -- The device's current token may inherit these tags.
            PERFORM tokenkeeper.register(token, scope.topic, scope.environment, moment, device);
        END IF;
    END IF;
    IF from_source IS NOT NULL THEN
        UPDATE tokenkeeper.token_event_log AS e SET source_id = from_source
        WHERE e.token_key = key AND e.topic_id = of_topic AND e.transaction_id = pg_current_xact_id()
          AND e.event IN ('registered', 'revived') AND e.source_id IS NULL AND e.at >= receipt;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.register_row(integer, bytea, timestamptz, text, text[], text, timestamptz, bigint, timestamptz) IS
    'Internal: applies one registration by register. The tags and the user count from details_at. Its events since receipt name the source.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.register_row(integer, bytea, timestamptz, text, text[], text, timestamptz, bigint, timestamptz) FROM PUBLIC;
