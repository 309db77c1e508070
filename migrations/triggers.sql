-- The triggers on tables.
--
-- CREATE OR REPLACE TRIGGER keeps others from writing to the table even if it changes nothing. It would wait for each open transaction that
-- has registered the first token of a topic, and such registrations would wait behind it. So a trigger is created only if it differs.

DO $$
DECLARE
    -- As pg_get_triggerdef prints it.
    definition text;
BEGIN
    FOREACH definition IN ARRAY ARRAY[
        'CREATE TRIGGER note_deletion AFTER DELETE ON tokenkeeper.ledger REFERENCING OLD TABLE AS gone FOR EACH STATEMENT '
        'EXECUTE FUNCTION tokenkeeper.note_deletion()',
        'CREATE TRIGGER check_topic BEFORE INSERT OR UPDATE OF gate ON tokenkeeper.topic FOR EACH ROW EXECUTE FUNCTION tokenkeeper.check_topic()',
        'CREATE TRIGGER warn_of_no_topic AFTER UPDATE OF gate, suppressed_retention, dormant_after, guard_allowance, guard_max_share, prune_allowance, '
        'prune_max_share, background_per_hour, max_per_second, alerts_per_day, confirm_share ON tokenkeeper.topic FOR EACH STATEMENT '
        'EXECUTE FUNCTION tokenkeeper.warn_of_no_topic()',
        'CREATE TRIGGER note_policy AFTER UPDATE ON tokenkeeper.topic FOR EACH ROW '
        'WHEN ((old.* IS DISTINCT FROM new.*)) EXECUTE FUNCTION tokenkeeper.note_policy()',
        'CREATE TRIGGER reconsider_guard AFTER UPDATE OF guard_allowance, guard_max_share ON tokenkeeper.topic FOR EACH ROW '
        'EXECUTE FUNCTION tokenkeeper.reconsider_guard()',
        'CREATE TRIGGER bound_attachment_failure BEFORE INSERT ON tokenkeeper.attachment_failure FOR EACH ROW '
        'EXECUTE FUNCTION tokenkeeper.bound_attachment_failure()',
        'CREATE TRIGGER check_campaign_token AFTER INSERT ON tokenkeeper.campaign_token REFERENCING NEW TABLE AS added FOR EACH STATEMENT '
        'EXECUTE FUNCTION tokenkeeper.check_campaign_token()',
        'CREATE CONSTRAINT TRIGGER close_campaign_list AFTER INSERT ON tokenkeeper.campaign_list DEFERRABLE INITIALLY DEFERRED FOR EACH ROW '
        'EXECUTE FUNCTION tokenkeeper.close_campaign_list()']
    LOOP
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_catalog.pg_trigger AS t
            WHERE t.tgrelid IN ('tokenkeeper.ledger'::regclass, 'tokenkeeper.topic'::regclass, 'tokenkeeper.campaign_token'::regclass,
                                'tokenkeeper.campaign_list'::regclass, 'tokenkeeper.attachment_failure'::regclass)
              AND pg_get_triggerdef(t.oid) = definition);
        IF definition LIKE 'CREATE CONSTRAINT TRIGGER%' THEN
            -- CREATE OR REPLACE cannot replace one.
            DROP TRIGGER IF EXISTS close_campaign_list ON tokenkeeper.campaign_list;
        END IF;
        EXECUTE replace(definition, 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER');
    END LOOP;
END
$$;
