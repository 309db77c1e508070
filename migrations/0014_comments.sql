-- oldest daemon: 0.1.0
--
-- What the comments say, brought up to what the migrations since then have changed.

COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text) IS
    'The gate, for one token: false if it is malformed, or suppressed and the topic''s gate does not only observe. An unknown token may be '
    'sent to. Never an error.';
COMMENT ON FUNCTION tokenkeeper.sendable(text[], text, text) IS
    'The gate, for a batch: those of the tokens that may be sent to (where the topic''s gate only observes, all that are well-formed), in the '
    'order and spelling given, duplicates kept; malformed ones left out. Never an error. Works on a standby.';
COMMENT ON TABLE tokenkeeper.ledger IS
    'One row a (topic, token). Written by the functions of this schema, pruned by the sweep, and never by hand; people read the view token. '
    'No foreign key to topic: it would lock one hot row a registration, and topics are never deleted.';
COMMENT ON COLUMN tokenkeeper.send_result.queued_at IS
    'Internal: when the row was inserted first, by the server''s clock; requeued and released results keep it.';
COMMENT ON TABLE tokenkeeper.send_result_aside IS
    'Results set aside for another try: their token was locked by an application, their batch had failed, they are bulky, they wait for '
    'their topic''s guard, or an operator has released them.';
COMMENT ON TABLE tokenkeeper.rejected_result IS
    'Results that could not be understood, or that the database would not take, whole, as they were queued. The sweep deletes them after '
    'sweep.rejected_retention.';
COMMENT ON COLUMN tokenkeeper.daemon.queue_depth_exact IS
    'False: estimated from the queue''s size, because it was large, or somebody had locked it.';
COMMENT ON TABLE tokenkeeper.token_count IS
    'Tokens by topic and state, counted now and then by a daemon (at most one hundredth of its time), for status, the share of the '
    'mass-failure guard and that of the sweep.';
COMMENT ON FUNCTION tokenkeeper.prepare_event_months() IS
    'Makes the partitions of token_event_log for this month and the next three. Each sweep calls it that is no dry run.';
COMMENT ON FUNCTION tokenkeeper.forget_event_month(timestamptz) IS
    'Drops the oldest month of history if it ends before an instant, after up to 10,000 events a call of no month; answers how many events '
    '(about), or null when there is nothing to drop. Called by the sweep until then, with a short lock_timeout, a transaction each.';
COMMENT ON TABLE tokenkeeper.operation IS
    'What the mass-failure guard and people did, a row each, and devices that have 50 tokens, a row a topic and day: what a token''s story '
    'does not tell can be told by its topic''s.';
COMMENT ON TABLE tokenkeeper.sweep_run IS
    'One row a sweep: requested, running, and how it ended. Interrupted ones stay; the next sweep goes on where they stopped, or after a '
    'forced one the next that is forced.';
COMMENT ON FUNCTION tokenkeeper.halt_drains() IS
    'Waits for the batches that are under way, and has none begin until the transaction ends. Raises 55P03 after ten seconds: an operator, '
    'or another forget, has an open transaction.';
