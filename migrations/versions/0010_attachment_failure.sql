-- oldest daemon: 0.1.0
--
-- Changes of attached tables that their triggers could not queue.

CREATE TABLE tokenkeeper.attachment_failure (
    failed_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    source_id       bigint NOT NULL,
    state           text NOT NULL,
    constraint_name text
);
-- Without an identity, a publication FOR ALL TABLES would forbid the DELETE.
ALTER TABLE tokenkeeper.attachment_failure REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.attachment_failure IS
    'Internal: changes of attached tables that could not be queued, at most about 100 of a source, until the daemon counts them in attached_table. Without '
    'their messages, which may quote a row.';
COMMENT ON COLUMN tokenkeeper.attachment_failure.state IS 'SQLSTATE of the error.';
COMMENT ON COLUMN tokenkeeper.attachment_failure.constraint_name IS 'The constraint that refused the row; null if it was none.';

CREATE INDEX attachment_failure_source ON tokenkeeper.attachment_failure (source_id);
COMMENT ON INDEX tokenkeeper.attachment_failure_source IS 'For the limit of a source.';
