-- oldest daemon: 0.1.0
--
-- Topics that move to another database, and from one. core/move explains.

-- A batch of a daemon asks only whether there are any.
CREATE INDEX topic_moved ON tokenkeeper.topic (topic) WHERE moved_to IS NOT NULL;
COMMENT ON INDEX tokenkeeper.topic_moved IS 'The topics that have moved to another database.';

CREATE TABLE tokenkeeper.moved_row (
    row_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic     text COLLATE "C" NOT NULL,
    queue     text COLLATE "C" NOT NULL CHECK (queue IN ('send_result', 'registration')),
    content   jsonb NOT NULL
);
COMMENT ON TABLE tokenkeeper.moved_row IS
    'Results and registrations that reached this database after their topic had moved. A daemon, or tokenkeeperd move, passes them on to the database that the map names.';
COMMENT ON COLUMN tokenkeeper.moved_row.content IS 'The row of the queue.';

CREATE INDEX moved_row_topic ON tokenkeeper.moved_row (topic, row_id);
COMMENT ON INDEX tokenkeeper.moved_row_topic IS 'The rows of a topic, in their order.';

CREATE TABLE tokenkeeper.arrival (
    source      text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    -- `copy production`, `final production`, the same for sandbox, or `rows`.
    stream      text COLLATE "C" NOT NULL,
    position    bytea NOT NULL DEFAULT '',
    taken       bigint NOT NULL DEFAULT 0,
    last_rows   bigint[] NOT NULL DEFAULT '{}',
    changed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_complete boolean NOT NULL DEFAULT false,
    PRIMARY KEY (source, topic, stream)
);
COMMENT ON TABLE tokenkeeper.arrival IS
    'How far a topic has arrived from another database. Each batch says so in its own transaction, so a move that was interrupted goes on where it was.';
COMMENT ON COLUMN tokenkeeper.arrival.source IS 'The other database, by its name in the map.';
COMMENT ON COLUMN tokenkeeper.arrival.stream IS 'copy and final: the first and the second time that all tokens come, each with an environment. rows: late rows of its queues.';
COMMENT ON COLUMN tokenkeeper.arrival.position IS 'The last token that has come.';
COMMENT ON COLUMN tokenkeeper.arrival.taken IS 'How many tokens or rows have come.';
COMMENT ON COLUMN tokenkeeper.arrival.last_rows IS 'The row_ids of the last batch of rows. The source may send them again, if it was interrupted before it could delete them.';
