-- oldest daemon: 0.1.0
--
-- Cleaning of attached tables: a sweep marks or deletes the rows whose token has been stale for long, and keeps each row as it was.

CREATE TABLE tokenkeeper.attachment_cleaning (
    source_id   bigint PRIMARY KEY REFERENCES tokenkeeper.attached_table ON DELETE CASCADE,
    mode        text NOT NULL CHECK (mode IN ('mark', 'delete')),
    mark_column text CHECK ((mark_column IS NULL) = (mode = 'delete')),
    mark_value  text CHECK ((mark_value IS NULL) = (mode = 'delete')),
    stale_for   interval NOT NULL CHECK (stale_for BETWEEN interval '1 hour' AND interval '3650 days'),
    cascades    boolean NOT NULL DEFAULT false,
    set_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    set_by      text NOT NULL DEFAULT session_user,
    cleaned     bigint NOT NULL DEFAULT 0,
    cleaned_at  timestamptz,
    failed      bigint NOT NULL DEFAULT 0,
    failure     text
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.attachment_cleaning IS
    'The attached tables that the sweep cleans, by set_cleaning, and what it did. To look at them, use the view cleaning.';
COMMENT ON COLUMN tokenkeeper.attachment_cleaning.mode IS
    'mark: set mark_column to mark_value. delete: delete the row.';
COMMENT ON COLUMN tokenkeeper.attachment_cleaning.mark_value IS 'An SQL expression, such as false or now().';
COMMENT ON COLUMN tokenkeeper.attachment_cleaning.stale_for IS
    'A row is due when its token has been stale for this long, counted from when the 410 was received.';
COMMENT ON COLUMN tokenkeeper.attachment_cleaning.cascades IS
    'Whether rows may be deleted although a foreign key then deletes or changes rows of other tables.';
COMMENT ON COLUMN tokenkeeper.attachment_cleaning.cleaned IS 'How many rows were marked or deleted since it was switched on; cleaned_at is the last time.';
COMMENT ON COLUMN tokenkeeper.attachment_cleaning.failed IS 'How many rows the table refused to change or delete since then; failure is the last error.';

CREATE TABLE tokenkeeper.cleaned_row (
    cleaned_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cleaned_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    source_id   bigint NOT NULL,
    table_id    regclass NOT NULL,
    mode        text NOT NULL CHECK (mode IN ('mark', 'delete')),
    mark_column text,
    topic_id    integer NOT NULL,
    token_key   bytea NOT NULL,
    key_columns text[] NOT NULL,
    key         text NOT NULL,
    row         jsonb NOT NULL
);
COMMENT ON TABLE tokenkeeper.cleaned_row IS
    'Each row of an attached table that a sweep has marked or deleted, as it was before, for restore_cleaned. Kept for sweep.held_retention.';
COMMENT ON COLUMN tokenkeeper.cleaned_row.key IS 'The row''s key, as text.';

CREATE INDEX cleaned_row_token ON tokenkeeper.cleaned_row (topic_id, token_key);
COMMENT ON INDEX tokenkeeper.cleaned_row_token IS 'For forget.';

CREATE INDEX cleaned_row_source ON tokenkeeper.cleaned_row (source_id, cleaned_at);
COMMENT ON INDEX tokenkeeper.cleaned_row_source IS 'For the limit of a day, and for restore_cleaned.';

CREATE TABLE tokenkeeper.sweep_table (
    run_id    bigint NOT NULL,
    source_id bigint NOT NULL,
    name      text NOT NULL,
    mode      text NOT NULL,
    rows      bigint NOT NULL DEFAULT 0,
    due       bigint NOT NULL DEFAULT 0,
    max_rows  bigint,
    refused   text,
    cleaned   bigint NOT NULL DEFAULT 0,
    failed    bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, source_id)
);
COMMENT ON TABLE tokenkeeper.sweep_table IS
    'What each sweep found to clean in attached tables, and what it did; see set_cleaning. Kept as long as its row in sweep_run.';
COMMENT ON COLUMN tokenkeeper.sweep_table.name IS 'The table.';
COMMENT ON COLUMN tokenkeeper.sweep_table.rows IS 'How many rows it had; an estimate if the sweep did not have to read them all.';
COMMENT ON COLUMN tokenkeeper.sweep_table.due IS 'How many of them were due.';
COMMENT ON COLUMN tokenkeeper.sweep_table.max_rows IS
    'How many could be cleaned, by sweep.prune_allowance and sweep.max_prune_share of the table''s rows within a day; null for no limit.';
COMMENT ON COLUMN tokenkeeper.sweep_table.refused IS 'Why it cleaned nothing, or stopped; null if nothing was in the way.';
COMMENT ON COLUMN tokenkeeper.sweep_table.cleaned IS 'How many rows it marked or deleted.';
COMMENT ON COLUMN tokenkeeper.sweep_table.failed IS 'How many rows the table refused to change or delete: see the view cleaning.';
