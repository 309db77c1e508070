-- oldest daemon: 0.1.0
--
-- Attached tables: tables of the provider whose triggers write to the queue of registrations.

CREATE TABLE tokenkeeper.attached_table (
    source_id        bigint PRIMARY KEY REFERENCES tokenkeeper.registration_source,
    -- regclass survives a dump and pg_upgrade; the type regprocedure would not, so generated functions are found by their names.
    table_id         regclass NOT NULL UNIQUE,
    name             text NOT NULL,
    attached_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    attached_by      text NOT NULL DEFAULT session_user,
    arguments        jsonb NOT NULL,
    columns          text[] NOT NULL,
    key_columns      text[] NOT NULL,
    topic_sql        text NOT NULL,
    environment_sql  text NOT NULL,
    token_sql        text NOT NULL,
    registered_sql   text,
    unregistered_sql text,
    on_delete        text NOT NULL CHECK (on_delete IN ('ignore', 'unregister')),
    rows_read_at     timestamptz,
    revive           text NOT NULL CHECK (revive IN ('by registered_at', 'by register only')),
    always           boolean NOT NULL,
    fault            text,
    fault_since      timestamptz,
    failures         bigint NOT NULL DEFAULT 0,
    failed_at        timestamptz,
    failure          text,
    compared_at      timestamptz,
    findings         jsonb
);
COMMENT ON TABLE tokenkeeper.attached_table IS
    'The tables of the provider that attach has connected to the ledger. To look at them, use the view attachment.';
COMMENT ON COLUMN tokenkeeper.attached_table.rows_read_at IS
    'Internal: when the last backfill or comparison that has read all rows began; null if none has come to its end since attach. Since then token_spelling '
    'has each unusual spelling.';
COMMENT ON COLUMN tokenkeeper.attached_table.source_id IS
    'The registration_source of what its triggers queue. The generated functions and triggers have this number in their names.';
COMMENT ON COLUMN tokenkeeper.attached_table.table_id IS 'The table. A number instead of a name if it was dropped without detach.';
COMMENT ON COLUMN tokenkeeper.attached_table.name IS 'The schema and name of the table when it was attached.';
COMMENT ON COLUMN tokenkeeper.attached_table.arguments IS 'The arguments of attach.';
COMMENT ON COLUMN tokenkeeper.attached_table.columns IS 'The columns that the triggers compare.';
COMMENT ON COLUMN tokenkeeper.attached_table.key_columns IS 'The key by which rows are read in batches; empty if the table has none.';
COMMENT ON COLUMN tokenkeeper.attached_table.token_sql IS
    'Internal: the token of a row, as an expression over a row of the table that is called r. So are the other columns that end in _sql.';
COMMENT ON COLUMN tokenkeeper.attached_table.fault IS 'Why the table''s changes do not arrive, as the daemon last saw it; null if they do.';
COMMENT ON COLUMN tokenkeeper.attached_table.failures IS 'How many changes its triggers could not queue since attach.';
COMMENT ON COLUMN tokenkeeper.attached_table.failure IS 'The error of the last change that could not be queued, at failed_at.';
COMMENT ON COLUMN tokenkeeper.attached_table.findings IS 'What the last complete comparison found, at compared_at: counts by kind.';

CREATE TABLE tokenkeeper.attachment_failure (
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    source_id bigint NOT NULL,
    error     text NOT NULL
);
-- Without an identity, a publication FOR ALL TABLES would forbid the DELETE.
ALTER TABLE tokenkeeper.attachment_failure REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.attachment_failure IS
    'Internal: changes of attached tables that could not be queued. The daemon counts them in attached_table and deletes them.';

CREATE TABLE tokenkeeper.attachment_timeout (
    source_id bigint NOT NULL,
    kind      text COLLATE "C" NOT NULL CHECK (kind IN ('has', 'compare')),
    timeouts  integer NOT NULL,
    last_at   timestamptz NOT NULL,
    PRIMARY KEY (source_id, kind)
);
COMMENT ON TABLE tokenkeeper.attachment_timeout IS
    'Internal: attached tables whose generated functions have run into statement_timeout since they last succeeded. From the third time on, fault in the '
    'view attachment says so, and they are called more rarely.';
COMMENT ON COLUMN tokenkeeper.attachment_timeout.kind IS
    'has: the look-up of tokens, before a logout is recorded. compare: a batch of a comparison by a daemon.';
COMMENT ON COLUMN tokenkeeper.attachment_timeout.timeouts IS 'How often, without a success in between.';

-- Neither unique nor a foreign key: two drains that note the same spelling must not wait for each other, and a second row of it does no harm.
CREATE TABLE tokenkeeper.token_spelling (
    token_key bytea NOT NULL,
    source_id bigint NOT NULL,
    spelling  text COLLATE "C" NOT NULL,
    seen_at   timestamptz NOT NULL
) WITH (fillfactor = 80);
ALTER TABLE tokenkeeper.token_spelling REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.token_spelling IS
    'How rows of attached tables spell their tokens, where that is unusual: neither plain hex in lower or upper case, nor the description of NSData. '
    'Together with the usual spellings, it finds each row by its token. A comparison removes spellings that the table has no more.';
COMMENT ON COLUMN tokenkeeper.token_spelling.source_id IS 'The attachment.';
COMMENT ON COLUMN tokenkeeper.token_spelling.spelling IS 'The text in the row, exactly.';
COMMENT ON COLUMN tokenkeeper.token_spelling.seen_at IS 'When a row with it was last seen, to the hour.';

CREATE INDEX token_spelling_token ON tokenkeeper.token_spelling (token_key, source_id);
COMMENT ON INDEX tokenkeeper.token_spelling_token IS 'For the look-up of a token, and for erasure.';
