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
    'Results and registrations that arrived after their topic had moved to another database. A daemon, or tokenkeeperd move, passes them on.';

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
COMMENT ON TABLE tokenkeeper.arrival IS 'Internal: how far a topic has arrived from another database, batch by batch, so that an interrupted move continues.';
COMMENT ON COLUMN tokenkeeper.arrival.source IS 'The other database, by its name in the map.';
COMMENT ON COLUMN tokenkeeper.arrival.stream IS 'copy and final: all tokens of an environment, for the first and second time. rows: late rows of its queues.';
COMMENT ON COLUMN tokenkeeper.arrival.position IS 'The last token that has arrived.';
COMMENT ON COLUMN tokenkeeper.arrival.taken IS 'How many tokens or rows have arrived.';
COMMENT ON COLUMN tokenkeeper.arrival.last_rows IS 'The row_ids of the last batch of rows, which an interrupted source may send again.';
