-- What the owner of an attached table sees and sets of its cleaning. Unlike a function, a view sees who asks: so these show each role its own tables,
-- and let it change nothing else.

CREATE OR REPLACE VIEW tokenkeeper.own_attachment WITH (security_barrier) AS
SELECT a.source_id, a.table_id, a.key_columns, a.topic_sql, a.environment_sql, a.token_sql, a.registered_sql, a.columns
FROM tokenkeeper.attached_table AS a
JOIN pg_catalog.pg_class AS c ON c.oid = a.table_id::oid
WHERE pg_catalog.pg_has_role(c.relowner, 'USAGE');
COMMENT ON VIEW tokenkeeper.own_attachment IS 'Internal: the attachments of tables that belong to the current role, for set_cleaning.';

CREATE OR REPLACE VIEW tokenkeeper.cleaning WITH (security_barrier) AS
SELECT a.name, c.mode, c.mark_column, c.mark_value, c.stale_for, c.cascades, c.set_at, c.set_by, c.cleaned, c.cleaned_at, c.failed, c.failure,
       l.run_id, l.rows, l.due, l.max_rows, l.refused, c.source_id
FROM tokenkeeper.attachment_cleaning AS c
JOIN tokenkeeper.attached_table AS a ON a.source_id = c.source_id
LEFT JOIN LATERAL (
    SELECT s.* FROM tokenkeeper.sweep_table AS s WHERE s.source_id = c.source_id ORDER BY s.run_id DESC LIMIT 1) AS l ON true
WHERE pg_catalog.has_table_privilege('tokenkeeper.attachment_cleaning', 'SELECT')
   OR EXISTS (SELECT FROM pg_catalog.pg_class AS t WHERE t.oid = a.table_id::oid AND pg_catalog.pg_has_role(t.relowner, 'USAGE'));
COMMENT ON VIEW tokenkeeper.cleaning IS
    'The attached tables that the sweep cleans, by set_cleaning, with what the last sweep found. An application sees the tables that it owns.';
COMMENT ON COLUMN tokenkeeper.cleaning.name IS 'The schema and name of the table.';
COMMENT ON COLUMN tokenkeeper.cleaning.cleaned IS 'How many rows were marked or deleted since it was switched on; cleaned_at is the last time.';
COMMENT ON COLUMN tokenkeeper.cleaning.failed IS 'How many rows the table refused to change or delete since then; failure is the last error.';
COMMENT ON COLUMN tokenkeeper.cleaning.run_id IS 'The last sweep that looked at the table; null if none has.';
COMMENT ON COLUMN tokenkeeper.cleaning.rows IS 'How many rows the table had then; an estimate if the sweep did not have to read them all.';
COMMENT ON COLUMN tokenkeeper.cleaning.due IS 'How many of them were due.';
COMMENT ON COLUMN tokenkeeper.cleaning.refused IS 'Why that sweep cleaned nothing, or stopped; null if nothing was in the way.';

CREATE OR REPLACE VIEW tokenkeeper.own_cleaning WITH (security_barrier) AS
SELECT c.source_id, c.mode, c.mark_column, c.mark_value, c.stale_for, c.cascades
FROM tokenkeeper.attachment_cleaning AS c
WHERE EXISTS (
    SELECT FROM tokenkeeper.attached_table AS a JOIN pg_catalog.pg_class AS t ON t.oid = a.table_id::oid
    WHERE a.source_id = c.source_id AND pg_catalog.pg_has_role(t.relowner, 'USAGE'))
WITH CHECK OPTION;
COMMENT ON VIEW tokenkeeper.own_cleaning IS 'Internal: through this view, set_cleaning sets how a table of the current role is cleaned.';

CREATE OR REPLACE VIEW tokenkeeper.cleaned WITH (security_barrier) AS
SELECT c.cleaned_id, c.cleaned_at, c.table_id, c.mode, c.mark_column, c.key_columns, c.key, c.row
FROM tokenkeeper.cleaned_row AS c
WHERE EXISTS (
    SELECT FROM pg_catalog.pg_class AS t WHERE t.oid = c.table_id::oid AND pg_catalog.pg_has_role(t.relowner, 'USAGE'));
COMMENT ON VIEW tokenkeeper.cleaned IS
    'The rows that sweeps have marked or deleted in tables of the current role, as they were before; see restore_cleaned. Kept for sweep.held_retention.';
COMMENT ON COLUMN tokenkeeper.cleaned.key IS 'The row''s key, as text: the values of key_columns.';
COMMENT ON COLUMN tokenkeeper.cleaned.row IS 'The whole row before it was marked or deleted.';
