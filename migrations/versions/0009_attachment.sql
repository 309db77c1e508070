-- oldest daemon: 0.1.0
--
-- Attached tables: tables of the provider whose triggers write to the queue of registrations.

CREATE TYPE tokenkeeper.fact AS (
    environment   text COLLATE "C",
    topic         text COLLATE "C",
    token         text COLLATE "C",
    registered_at timestamptz,
    device_id     text COLLATE "C",
    user_id       text COLLATE "C",
    tags          text[] COLLATE "C"
);
COMMENT ON TYPE tokenkeeper.fact IS
    'What a row of an attached table says about a token, as it is queued: the token in plain hex if it can be read. Empty or {}: none.';

CREATE TABLE tokenkeeper.attached_table (
    source_id   bigint PRIMARY KEY REFERENCES tokenkeeper.registration_source,
    name        text COLLATE "C" NOT NULL UNIQUE,
    -- regclass survives a dump and pg_upgrade; the type regprocedure would not, so generated functions are found by their names.
    table_id    regclass NOT NULL,
    table_name  text NOT NULL,
    attached_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attached_by text NOT NULL DEFAULT session_user,
    arguments   jsonb NOT NULL,
    facts       jsonb NOT NULL,
    columns     text[] NOT NULL,
    key_columns text[] NOT NULL,
    on_delete   text NOT NULL CHECK (on_delete IN ('ignore', 'unregister')),
    always      boolean NOT NULL,
    fault       text,
    fault_since timestamptz,
    failures    bigint NOT NULL DEFAULT 0,
    failed_at   timestamptz,
    failure     text,
    checked_at  timestamptz,
    differences bigint
);
COMMENT ON TABLE tokenkeeper.attached_table IS
    'The tables that attach has connected to the ledger. To read it, use the view attachment. It stores what attach was given as text, which no function of '
    'the schema executes with rights of its own.';
COMMENT ON COLUMN tokenkeeper.attached_table.source_id IS
    'The registration_source of what its triggers queue. The generated functions and triggers have it in their names.';
COMMENT ON COLUMN tokenkeeper.attached_table.name IS 'The name given to attach, or else table_name. A table may be attached several times.';
COMMENT ON COLUMN tokenkeeper.attached_table.table_id IS 'The table; a number instead of a name if it was dropped without detach.';
COMMENT ON COLUMN tokenkeeper.attached_table.table_name IS 'The schema and name of the table when it was attached.';
COMMENT ON COLUMN tokenkeeper.attached_table.arguments IS 'The expressions given to attach.';
COMMENT ON COLUMN tokenkeeper.attached_table.facts IS
    'By fact, the SQL that attach made of the expression, for a row called r; look_up finds the rows with a token, token_column is the column that is the '
    'token. Only sessions of the table''s owner execute it.';
COMMENT ON COLUMN tokenkeeper.attached_table.columns IS 'The columns that the expressions use.';
COMMENT ON COLUMN tokenkeeper.attached_table.key_columns IS 'The key by which a backfill reads the rows; empty if the table has none.';
COMMENT ON COLUMN tokenkeeper.attached_table.fault IS 'Why the table''s changes do not arrive, as the daemon last saw it; null if they do.';
COMMENT ON COLUMN tokenkeeper.attached_table.failures IS
    'How many changes its triggers could not queue since attach. Beyond about 100 within a minute, they are not counted.';
COMMENT ON COLUMN tokenkeeper.attached_table.failure IS 'SQLSTATE of the last such change, at failed_at, and the name of the constraint, if any.';
COMMENT ON COLUMN tokenkeeper.attached_table.checked_at IS 'When a check last finished; null if none has.';
COMMENT ON COLUMN tokenkeeper.attached_table.differences IS 'How many tokens then differed between the table and the ledger, and were not repaired.';
