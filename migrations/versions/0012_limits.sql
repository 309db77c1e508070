-- oldest daemon: 0.1.0
--
-- What the limits of topic_policy count: requests per second of a topic, and alerts per device and day.

CREATE TABLE tokenkeeper.topic_rate (
    topic_id     integer PRIMARY KEY,
    next_send_at timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_rate IS 'When the next request of a topic with max_per_second may be sent. All daemons share the row, and so the rate.';

CREATE TABLE tokenkeeper.alert_send (
    topic_id  integer NOT NULL,
    token_key bytea NOT NULL,
    day       date NOT NULL,
    alerts    integer NOT NULL,
    room      integer NOT NULL,
    PRIMARY KEY (topic_id, token_key)
) WITH (fillfactor = 80);
COMMENT ON TABLE tokenkeeper.alert_send IS 'How many alerts each device of a topic with alerts_per_day got on its latest day. Swept after two days.';
COMMENT ON COLUMN tokenkeeper.alert_send.day IS 'The day, in UTC.';
COMMENT ON COLUMN tokenkeeper.alert_send.alerts IS 'How many alerts of that day were claimed for it.';
COMMENT ON COLUMN tokenkeeper.alert_send.room IS 'How many more the device could get at the latest claim.';
