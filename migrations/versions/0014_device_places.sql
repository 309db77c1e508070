-- oldest daemon: 0.1.0
--
-- A device whose tokens are on several shards: see docs/decisions/shards.md. All of these tables are empty in a database that is not sharded.
--
-- Each device has a home: the shard that its digest gives. A shard announces to it the latest registration that named the device there; the home keeps
-- these in device_home, and gives each shard notice of the latest of the others. In the same way, each shard announces the tags that the device's next
-- token inherits, and has notice of those of the others. Everything is a state with a version, so messages may arrive late, twice and in any order.

CREATE TABLE tokenkeeper.device_announcement (
    named_at       timestamptz NOT NULL DEFAULT '-infinity',
    elsewhere_at   timestamptz NOT NULL DEFAULT '-infinity',
    version        bigint NOT NULL,
    generation     bigint NOT NULL,
    notice_version bigint NOT NULL DEFAULT 0,
    topic_id       integer NOT NULL,
    home           smallint NOT NULL,
    is_pending     boolean NOT NULL,
    decides        boolean,
    deletes        boolean NOT NULL DEFAULT false,
    is_lowered     boolean NOT NULL DEFAULT false,
    has_tokens     boolean NOT NULL DEFAULT true,
    tags_at        timestamptz,
    elsewhere_tags_at timestamptz,
    device_digest  bytea NOT NULL,
    token_key      bytea NOT NULL DEFAULT '',
    elsewhere_key  bytea NOT NULL DEFAULT '',
    device_id      text COLLATE "C",
    tags           text[] COLLATE "C",
    tag_changes    tokenkeeper.tag_change[],
    elsewhere_tags text[] COLLATE "C",
    elsewhere_changes tokenkeeper.tag_change[],
    PRIMARY KEY (topic_id, device_digest)
) WITH (fillfactor = 90);
COMMENT ON TABLE tokenkeeper.device_announcement IS
    'One row per (topic, device) of this shard: what it has announced to the device''s home, and what that has said of the other shards. It is changed under the lock '
    'on the row of device.';
COMMENT ON COLUMN tokenkeeper.device_announcement.named_at IS
    'The announced registration: the latest that named the device here. A later one of the same token is announced only if another shard may have a later one.';
COMMENT ON COLUMN tokenkeeper.device_announcement.elsewhere_at IS
    'The latest registration that named the device on another shard, as far as it matters here; -infinity if there is none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.version IS 'Grows with each announcement: microseconds since 1970, or one more than the last.';
COMMENT ON COLUMN tokenkeeper.device_announcement.generation IS
    'The version with which the device came to this shard. Notices that answer an earlier stay of the device do not count.';
COMMENT ON COLUMN tokenkeeper.device_announcement.notice_version IS 'Of the latest notice from the home; 0 if there was none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.home IS 'The home''s number.';
COMMENT ON COLUMN tokenkeeper.device_announcement.is_pending IS 'True until the home has acknowledged this version.';
COMMENT ON COLUMN tokenkeeper.device_announcement.decides IS
    'Whether other shards decide again which token is current. False after tokens were only deleted: that revives none, as in a single database. Null if only tags '
    'have changed.';
COMMENT ON COLUMN tokenkeeper.device_announcement.deletes IS 'Whether tokens were deleted: then the device ends if none of its tokens is left on any shard.';
COMMENT ON COLUMN tokenkeeper.device_announcement.is_lowered IS
    'True if tokens were deleted, here or elsewhere, and the device''s current token has not been decided again since.';
COMMENT ON COLUMN tokenkeeper.device_announcement.has_tokens IS
    'Whether the device has a token here. If not, what it remembers here counts as long as it has one on another shard.';
COMMENT ON COLUMN tokenkeeper.device_announcement.tags_at IS 'As in device: of the tags that the device''s next token inherits from those here.';
COMMENT ON COLUMN tokenkeeper.device_announcement.tag_changes IS 'The latest changes of tags by the device and its superseded tokens here; null if there are none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.elsewhere_tags_at IS 'Of the latest of the tags that the other shards have announced; null if there are none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.elsewhere_tags IS 'The tags of elsewhere_tags_at.';
COMMENT ON COLUMN tokenkeeper.device_announcement.elsewhere_changes IS 'The latest changes of tags that the other shards have announced; null if there are none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.device_digest IS 'See device_digest(text).';
COMMENT ON COLUMN tokenkeeper.device_announcement.token_key IS 'The token of the announced registration; empty if there is none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.elsewhere_key IS 'The token of the registration at elsewhere_at; empty if there is none.';
COMMENT ON COLUMN tokenkeeper.device_announcement.device_id IS
    'Null if the device has left this shard: the row is then deleted once the home has acknowledged that.';

CREATE INDEX device_announcement_pending ON tokenkeeper.device_announcement (home, device_digest) WHERE is_pending;
COMMENT ON INDEX tokenkeeper.device_announcement_pending IS 'What the daemon delivers.';

CREATE TYPE tokenkeeper.device_place AS (
    shard          integer,
    version        bigint,
    generation     bigint,
    named_at       timestamptz,
    token_key      bytea,
    has_tokens     boolean,
    tags_at        timestamptz,
    tags           text[] COLLATE "C",
    tag_changes    tokenkeeper.tag_change[],
    elsewhere_at   timestamptz,
    elsewhere_key  bytea,
    elsewhere_tags_at timestamptz,
    elsewhere_tags text[] COLLATE "C",
    elsewhere_changes tokenkeeper.tag_change[],
    notice_version bigint,
    is_lowered     boolean,
    is_gone        boolean
);
COMMENT ON TYPE tokenkeeper.device_place IS
    'What a shard has announced of a device, and what the home has given it notice of. The fields are those of device_announcement; if is_gone, the device has '
    'left that shard, and the versions remain for a day, so that a late message does not bring it back.';

CREATE TABLE tokenkeeper.device_home (
    topic_id      integer NOT NULL,
    device_digest bytea NOT NULL,
    device_id     text COLLATE "C",
    places        tokenkeeper.device_place[] NOT NULL DEFAULT '{}',
    gone_at       timestamptz,
    PRIMARY KEY (topic_id, device_digest)
) WITH (fillfactor = 90);
COMMENT ON TABLE tokenkeeper.device_home IS 'One row per (topic, device) whose home this shard is: on which shards it has tokens, or had until a day ago.';
COMMENT ON COLUMN tokenkeeper.device_home.device_digest IS 'See device_digest(text).';
COMMENT ON COLUMN tokenkeeper.device_home.device_id IS 'Null if the device has left all shards.';
COMMENT ON COLUMN tokenkeeper.device_home.gone_at IS 'When it left the last shard (server clock); null if it is on one.';

CREATE INDEX device_home_gone ON tokenkeeper.device_home (gone_at) WHERE gone_at IS NOT NULL;
COMMENT ON INDEX tokenkeeper.device_home_gone IS 'For delete_gone_devices.';

CREATE TABLE tokenkeeper.device_notice (
    topic_id      integer NOT NULL,
    to_shard      integer NOT NULL,
    device_digest bytea NOT NULL,
    version       bigint NOT NULL,
    generation    bigint NOT NULL,
    elsewhere_at  timestamptz NOT NULL,
    elsewhere_key bytea NOT NULL,
    elsewhere_tags_at timestamptz,
    elsewhere_tags text[] COLLATE "C",
    elsewhere_changes tokenkeeper.tag_change[],
    decides       boolean,
    ends          boolean NOT NULL,
    PRIMARY KEY (topic_id, to_shard, device_digest)
);
COMMENT ON TABLE tokenkeeper.device_notice IS
    'Notices that the daemon has to deliver: a home tells a shard the latest registration that named a device on another one. Deleted when acknowledged.';
COMMENT ON COLUMN tokenkeeper.device_notice.to_shard IS 'A number of a shard; it may be this one.';
COMMENT ON COLUMN tokenkeeper.device_notice.version IS 'As in device_announcement.';
COMMENT ON COLUMN tokenkeeper.device_notice.generation IS 'The generation of the announcement that it answers.';
COMMENT ON COLUMN tokenkeeper.device_notice.decides IS 'As in device_announcement.';
COMMENT ON COLUMN tokenkeeper.device_notice.ends IS
    'Whether the last of the device''s tokens was deleted: the shard then forgets the device, unless it has a token again.';

CREATE INDEX device_notice_to ON tokenkeeper.device_notice (to_shard, device_digest);
COMMENT ON INDEX tokenkeeper.device_notice_to IS 'What the daemon delivers.';

CREATE TABLE tokenkeeper.device_check (
    topic_id      integer NOT NULL,
    device_digest bytea NOT NULL
);
ALTER TABLE tokenkeeper.device_check REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.device_check IS
    'Devices of which tokens were deleted: the daemon looks whether that is to be announced, so that what deletes tokens waits for no lock on a device.';
