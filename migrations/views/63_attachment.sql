-- The attached tables, for people.

CREATE OR REPLACE VIEW tokenkeeper.attachment AS
SELECT a.source_id, a.name, a.table_id, a.attached_at, a.attached_by, c.relowner::regrole::text AS owner, a.columns, a.on_delete, a.revive,
       CASE WHEN c.oid IS NULL THEN 'dropped'
            WHEN t.triggers < 2 + (a.on_delete = 'unregister')::integer THEN 'missing'
            WHEN t.states = '{O}' THEN 'enabled'
            WHEN t.states = '{A}' THEN 'always'
            ELSE 'disabled' END AS triggers,
       a.fault, a.fault_since, a.failures, a.failed_at, a.failure, a.compared_at, a.findings, a.arguments
FROM tokenkeeper.attached_table AS a
LEFT JOIN pg_catalog.pg_class AS c ON c.oid = a.table_id
CROSS JOIN LATERAL (
    SELECT count(*) AS triggers, array_agg(DISTINCT g.tgenabled::text) AS states FROM pg_catalog.pg_trigger AS g
    WHERE g.tgrelid = a.table_id AND g.tgname IN ('tokenkeeper_insert_' || a.source_id, 'tokenkeeper_update_' || a.source_id,
                                                  'tokenkeeper_delete_' || a.source_id)) AS t;
COMMENT ON VIEW tokenkeeper.attachment IS 'The attached tables: how they were attached, whether their changes arrive, and what the last comparison found.';
COMMENT ON COLUMN tokenkeeper.attachment.triggers IS
    'enabled: they fire, except for what logical replication applies (session_replication_role = replica). always: for that, too. Otherwise disabled, '
    'missing, or dropped with the table.';
COMMENT ON COLUMN tokenkeeper.attachment.revive IS
    'by registered_at, or by register only: changes of the table then register unknown tokens, and revive none.';
COMMENT ON COLUMN tokenkeeper.attachment.fault IS 'Why the table''s changes do not arrive, as the daemon last saw it; null if they do.';
COMMENT ON COLUMN tokenkeeper.attachment.failures IS 'How many changes its triggers could not queue since attach. A reconciliation finds them.';
COMMENT ON COLUMN tokenkeeper.attachment.findings IS 'What the last complete comparison found, at compared_at: counts by kind.';
