-- The attached tables, for people, and the failures that their triggers report. Unlike a function, a view sees the role that uses it: so these show
-- each application its own tables, and let it report failures of its own tables only.

CREATE OR REPLACE VIEW tokenkeeper.attachment WITH (security_barrier) AS
SELECT a.source_id, a.name, a.table_id, a.table_name, a.attached_at, a.attached_by, c.relowner::regrole::text AS owner, a.on_delete,
       CASE WHEN c.oid IS NULL THEN 'dropped'
            WHEN t.triggers < 2 + (a.on_delete = 'unregister')::integer THEN 'missing'
            WHEN t.states = '{O}' THEN 'enabled'
            WHEN t.states = '{A}' THEN 'always'
            ELSE 'disabled' END AS triggers,
       a.fault, a.fault_since, a.failures, a.failed_at, a.failure, a.checked_at, a.differences, a.arguments
FROM tokenkeeper.attached_table AS a
LEFT JOIN pg_catalog.pg_class AS c ON c.oid = a.table_id
CROSS JOIN LATERAL (
    SELECT count(*) AS triggers, array_agg(DISTINCT g.tgenabled::text) AS states FROM pg_catalog.pg_trigger AS g
    WHERE g.tgrelid = a.table_id AND g.tgname IN ('tokenkeeper_insert_' || a.source_id, 'tokenkeeper_update_' || a.source_id,
                                                  'tokenkeeper_delete_' || a.source_id)) AS t
WHERE pg_catalog.pg_has_role(c.relowner, 'MEMBER')
   -- A table that was dropped has no owner.
   OR (c.oid IS NULL AND EXISTS (SELECT FROM pg_catalog.pg_roles AS o WHERE o.rolname = a.attached_by AND pg_catalog.pg_has_role(o.oid, 'MEMBER')))
   OR EXISTS (SELECT FROM pg_catalog.pg_roles AS o
              WHERE (o.rolname IN ('tokenkeeper_operator', 'tokenkeeper_reader', 'tokenkeeper_daemon')
                     OR o.oid = (SELECT n.nspowner FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper'))
                AND pg_catalog.pg_has_role(o.oid, 'MEMBER'));
COMMENT ON VIEW tokenkeeper.attachment IS 'The attached tables, and whether their changes arrive. An application sees the tables of its roles.';
COMMENT ON COLUMN tokenkeeper.attachment.triggers IS 'enabled; always (also for logical replication); disabled; missing; or dropped with the table.';
COMMENT ON COLUMN tokenkeeper.attachment.fault IS 'Why changes do not arrive, as a daemon last saw it; null if they do.';
COMMENT ON COLUMN tokenkeeper.attachment.failures IS
    'Changes that its triggers could not queue since attach. Beyond about 100 within a minute, they are not counted.';
COMMENT ON COLUMN tokenkeeper.attachment.failure IS 'SQLSTATE of the last one, and the name of the constraint, if any.';
COMMENT ON COLUMN tokenkeeper.attachment.checked_at IS 'When a check (backfill --check) last finished.';
COMMENT ON COLUMN tokenkeeper.attachment.differences IS 'Tokens that then differed between the table and the ledger, and were not repaired.';

CREATE OR REPLACE VIEW tokenkeeper.own_attachment_failure WITH (security_barrier) AS
SELECT f.source_id, f.state, f.constraint_name
FROM tokenkeeper.attachment_failure AS f
WHERE EXISTS (
    SELECT FROM tokenkeeper.attached_table AS a JOIN pg_catalog.pg_class AS c ON c.oid = a.table_id::oid
    WHERE a.source_id = f.source_id AND pg_catalog.pg_has_role(c.relowner, 'USAGE'))
WITH CHECK OPTION;
COMMENT ON VIEW tokenkeeper.own_attachment_failure IS
    'Internal: through it, note_attachment_failure reports failures of attached tables of the current role, and of no others.';
