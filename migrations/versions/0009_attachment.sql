-- oldest daemon: 0.1.0
--
-- Attached tables: tables of the provider whose triggers write to the queue of registrations.

CREATE TABLE tokenkeeper.attached_table (
    source_id   bigint PRIMARY KEY REFERENCES tokenkeeper.registration_source,
    -- regclass survives a dump and pg_upgrade; the type regprocedure would not, so generated functions are found by their names.
    table_id    regclass NOT NULL UNIQUE,
    name        text NOT NULL,
    attached_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attached_by text NOT NULL DEFAULT session_user,
    arguments   jsonb NOT NULL,
    columns     text[] NOT NULL,
    key_columns text[] NOT NULL,
    on_delete   text NOT NULL CHECK (on_delete IN ('ignore', 'unregister')),
    revive      text NOT NULL CHECK (revive IN ('by registered_at', 'by register only')),
    always      boolean NOT NULL,
    fault       text,
    fault_since timestamptz,
    failures    bigint NOT NULL DEFAULT 0,
    failed_at   timestamptz,
    failure     text
);
COMMENT ON TABLE tokenkeeper.attached_table IS
    'The tables of the provider that attach has connected to the ledger. To look at them, use the view attachment. What attach was given is stored here as '
    'text, and no function of the schema executes it.';
COMMENT ON COLUMN tokenkeeper.attached_table.source_id IS
    'The registration_source of what its triggers queue. The generated functions and triggers have this number in their names.';
COMMENT ON COLUMN tokenkeeper.attached_table.table_id IS 'The table. A number instead of a name if it was dropped without detach.';
COMMENT ON COLUMN tokenkeeper.attached_table.name IS 'The schema and name of the table when it was attached.';
COMMENT ON COLUMN tokenkeeper.attached_table.arguments IS 'The arguments of attach.';
COMMENT ON COLUMN tokenkeeper.attached_table.columns IS 'The columns that the triggers compare; the first is the token.';
COMMENT ON COLUMN tokenkeeper.attached_table.key_columns IS 'The key by which a backfill reads the rows; empty if the table has none.';
COMMENT ON COLUMN tokenkeeper.attached_table.fault IS 'Why the table''s changes do not arrive, as the daemon last saw it; null if they do.';
COMMENT ON COLUMN tokenkeeper.attached_table.failures IS
    'How many changes its triggers could not queue since attach. Of more than about 100 within a minute, the rest is not counted.';
COMMENT ON COLUMN tokenkeeper.attached_table.failure IS
    'SQLSTATE of the last change that could not be queued, at failed_at, and the name of the constraint if there is one.';
