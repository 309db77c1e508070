-- The queues: INSERT and COPY reach the shard of each token.
--
-- Foreign partitions have only the columns that applications may write; each shard adds the defaults of the others. A row without a token, or
-- with a malformed one, goes to shard 0, which rejects it there with the error. The shards commit one after the other: an INSERT that fails
-- between two commits may be queued in part. Repeat it: results and registrations may come twice, and requests with the same apns_id are taken once.

DO $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    relations CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'relations';
    queue record;
    commented record;
BEGIN
    FOR queue IN VALUES
        ('send_result', 'send_result', 'environment text, topic text, token text, status text, body text, apns_id text, sent_at timestamptz',
         'environment, topic, token, status, body, apns_id, sent_at', 'tokenkeeper_sender'),
        ('registration', 'registration', 'environment text, topic text, token text, registered_at timestamptz, device_id text, user_id text, '
         'tags text[], unregistered boolean, source_id bigint',
         'environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id', 'tokenkeeper_app'),
        -- What fails between two commits is repeated: the shard takes each apns_id once.
        ('send_request', 'send_request_once', 'environment text, topic text, token text, payload json, push_type text, priority integer, '
         'expiration timestamptz, collapse_id text, scheduled_at timestamptz, apns_id uuid DEFAULT gen_random_uuid()',
         'environment, topic, token, payload, push_type, priority, expiration, collapse_id, scheduled_at, apns_id', 'tokenkeeper_sender')
    LOOP
        EXECUTE format('DROP TABLE IF EXISTS tokenkeeper.%I', queue.column1);
        EXECUTE format('CREATE TABLE tokenkeeper.%I (%s) PARTITION BY LIST (tokenkeeper.shard_of(token, %s))', queue.column1, queue.column3, shards);
        EXECUTE format('ALTER TABLE tokenkeeper.%I ALTER COLUMN environment SET DEFAULT ''production''', queue.column1);
        EXECUTE format('GRANT INSERT (%s) ON tokenkeeper.%I TO %I', queue.column4, queue.column1, queue.column5);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.%I IS %L', queue.column1, (relations -> queue.column1 ->> 'comment')
            || ' Through the router: each row goes to the shard of its token, and the shards commit one after the other.');
        FOR commented IN
            SELECT c.name, c.comment
            FROM jsonb_to_recordset(relations -> queue.column1 -> 'columns') AS c (name text, comment text)
            JOIN pg_catalog.pg_attribute AS a ON a.attrelid = format('tokenkeeper.%I', queue.column1)::regclass AND a.attname = c.name
            WHERE c.comment IS NOT NULL
        LOOP
            EXECUTE format('COMMENT ON COLUMN tokenkeeper.%I.%I IS %L', queue.column1, commented.name, commented.comment);
        END LOOP;
        FOR shard IN 0..shards - 1 LOOP
            EXECUTE format('CREATE FOREIGN TABLE tokenkeeper_shard_%s.%I PARTITION OF tokenkeeper.%I FOR VALUES IN (%s) SERVER tokenkeeper_shard_%s '
                           'OPTIONS (schema_name ''tokenkeeper'', table_name %L, batch_size ''1000'')',
                           shard, queue.column1, queue.column1, shard, shard, queue.column2);
        END LOOP;
    END LOOP;
END
$$;
