-- oldest daemon: 0.1.0
--
-- The ledger: what is known about each device token.
--
-- The one rule: for each (environment, topic, token), the ledger keeps the latest registration and, for each cause of suppression, the
-- latest instant of that cause. A token is suppressed if and only if the greatest of these instants is not earlier than the
-- registration. Each instant is a maximum, so results may arrive late, twice and in any order.
--
-- One device, one token: a device's latest registration names its token, and its other tokens are superseded.
-- "Latest" is the greatest (registered_at, token). The registrations that count are those that named the device, and those of the
-- tokens that belong to it: a registration without a device_id counts for the device that the token already has. A token belongs
-- to the device of its latest registration that named one. None of this depends on the order of arrival.
--
-- Tags: for each tag of a token, the latest of its latest registration with tags and the latest change of that tag decides; at the same instant the
-- change counts, and of two changes the removal. A device's current token has the changes of all the device's tokens, and those of the device; and if
-- it was never registered with tags, the tags of the latest registration of the device's tokens that had some. Other tokens have only their own.
-- A registration with tags ends earlier changes of the same token.
--
-- Collation: each text column with an index is COLLATE "C". Byte order survives an upgrade of glibc or ICU, and the caller's
-- collation cannot keep an index from being used.

-- Versioned, because an index calls it (see 0007_outbox).
CREATE FUNCTION tokenkeeper.token_key(token text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    -- decode() alone would accept white space.
    WHEN octet_length(token) <= 1024 AND token COLLATE "C" ~ '^(?:[0-9A-Fa-f]{2})+$'
    THEN decode(token, 'hex')
END;
COMMENT ON FUNCTION tokenkeeper.token_key(text) IS
    'The key of a device token: the bytes of its hex text, in upper or lower case. Null unless the text is 1 to 512 bytes in hex.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.token_key(text) FROM PUBLIC;

-- Versioned, because an index calls it. In plpgsql, so that it is never inlined: the planner inlines a function only for roles that may execute it,
-- and it keeps the index's expression for the session, so a query by another role in the same session would not match the index.
CREATE FUNCTION tokenkeeper.tag_vector(tags text[]) RETURNS tsvector
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
    -- An error for a null or empty element: every function that writes tags refuses these. To remove them here would double the cost.
    RETURN pg_catalog.array_to_tsvector(coalesce(tags, '{}'));
END
$$;
COMMENT ON FUNCTION tokenkeeper.tag_vector(text[]) IS
    'A token''s tags for the operator @@ with tag_query: each tag is one lexeme as it is, without stemming. Null gives the empty vector, so that !muted is true '
    'for a token without tags.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.tag_vector(text[]) FROM PUBLIC;

CREATE TYPE tokenkeeper.tag_change AS (
    tag        text COLLATE "C",
    changed_at timestamptz,
    added      boolean
);
COMMENT ON TYPE tokenkeeper.tag_change IS 'That a tag was added or removed; see the function tag.';

CREATE TABLE tokenkeeper.ledger (
    registered_at          timestamptz NOT NULL DEFAULT '-infinity',
    stale_at               timestamptz,
    suspect_at             timestamptz,
    unregistered_by_app_at timestamptz,
    superseded_at          timestamptz,
    suppressed_since       timestamptz,
    topic_id               integer NOT NULL,
    suppressed             boolean NOT NULL GENERATED ALWAYS AS (
        coalesce(greatest(stale_at, suspect_at, unregistered_by_app_at, superseded_at) >= registered_at, false)) STORED,
    token_key              bytea NOT NULL CHECK (octet_length(token_key) BETWEEN 1 AND 512),
    stale_reason           text COLLATE "C",
    suspect_reason         text COLLATE "C",
    device_id              text COLLATE "C",
    tags                   text[] COLLATE "C",
    user_id                text COLLATE "C",
    device_at              timestamptz,
    user_at                timestamptz,
    tags_at                timestamptz,
    registered_tags        text[] COLLATE "C",
    tag_changes            tokenkeeper.tag_change[],
    has_tag_changes        boolean,
    PRIMARY KEY (topic_id, token_key)
)
-- Leaves room on each page for the next version of a row, so that a registration changes no index (a HOT update).
WITH (fillfactor = 90);
COMMENT ON TABLE tokenkeeper.ledger IS
    'One row per (topic, token). The functions of this schema write it and the sweep prunes it; never change it by hand. To look at it, use the view token. '
    'It has no foreign key to topic, which would lock one hot row per registration; reap_topics keeps each topic that has a row here.';
COMMENT ON COLUMN tokenkeeper.ledger.registered_at IS
    'The latest registration; -infinity if the token was never registered, because null would slip through comparisons.';
COMMENT ON COLUMN tokenkeeper.ledger.stale_at IS 'The latest 410 with a reason and a timestamp: the timestamp that APNs gave.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_at IS
    'The latest BadDeviceToken, DeviceTokenNotForTopic or malformed 410 that counts: when that request was sent.';
COMMENT ON COLUMN tokenkeeper.ledger.unregistered_by_app_at IS 'The latest call of unregister.';
COMMENT ON COLUMN tokenkeeper.ledger.superseded_at IS
    'Set while the device''s latest registration names another token. It then equals registered_at: the earliest instant that suppresses, '
    'so it does not depend on when the other registrations arrived, and each other cause outranks it.';
COMMENT ON COLUMN tokenkeeper.ledger.suppressed_since IS
    'When the ledger learned that the token is suppressed (server clock). The retention starts here, because the timestamp of a 410 may be older '
    'than the retention when the 410 arrives.';
COMMENT ON COLUMN tokenkeeper.ledger.suppressed IS
    'The one rule, computed by the database: true if an instant of suppression is not earlier than the registration.';
COMMENT ON COLUMN tokenkeeper.ledger.token_key IS 'The bytes of the device token; see token_key(text).';
COMMENT ON COLUMN tokenkeeper.ledger.stale_reason IS 'The reason of the 410 at stale_at; on a tie, the greatest text.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_reason IS 'The reason of the result at suspect_at; on a tie, the greatest text.';
COMMENT ON COLUMN tokenkeeper.ledger.device_at IS 'The latest registration that named a device, or cleared it. It set device_id.';
COMMENT ON COLUMN tokenkeeper.ledger.user_at IS 'The latest registration that named a user, or cleared it. It set user_id.';
COMMENT ON COLUMN tokenkeeper.ledger.tags_at IS
    'The latest registration with tags. If null, the token never had tags of its own; tags, if any, are inherited from the device''s other tokens.';

COMMENT ON COLUMN tokenkeeper.ledger.tags IS 'The tags that the token has, with all changes; null if it never had any.';
COMMENT ON COLUMN tokenkeeper.ledger.registered_tags IS
    'If has_tag_changes: the tags without the changes, registered or inherited. Otherwise null, and tags has them.';
COMMENT ON COLUMN tokenkeeper.ledger.tag_changes IS
    'The latest change of each tag that was addressed to this token and is not earlier than tags_at; null if there is none.';
COMMENT ON COLUMN tokenkeeper.ledger.has_tag_changes IS
    'True if there are changes of this token; or, for a device''s current token, of the device or one of its tokens. Otherwise null.';

-- The predicate is the generated column and not the comparison: registered_at in a predicate would prevent HOT updates.
CREATE INDEX ledger_suppressed ON tokenkeeper.ledger (topic_id, suppressed_since) WHERE suppressed;
COMMENT ON INDEX tokenkeeper.ledger_suppressed IS 'The suppressed tokens in the order in which the sweep prunes them.';

-- Most tokens that the gate is asked about are not suppressed, and for these it reads no row. The predicate is written so that
-- ledger_suppressed, which lacks the key, cannot answer the same question. It costs no HOT update: another predicate has "suppressed" already.
CREATE INDEX ledger_suppressed_key ON tokenkeeper.ledger (topic_id, token_key) WHERE suppressed > false;
COMMENT ON INDEX tokenkeeper.ledger_suppressed_key IS 'For the gate. Query it with suppressed > false.';

-- topic_id is an expression here, and the functions compare topic_id + 0. Otherwise a plan made for a small ledger would use the topic
-- part of the primary key, and would read the whole topic after the ledger has grown. superseded_at does not change when an active
-- token is registered again. It finds the device's current token, and the latest of its others, without reading all of them.
CREATE INDEX ledger_device ON tokenkeeper.ledger (device_id, (topic_id + 0), superseded_at) WHERE device_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_device IS
    'The tokens of a device in a topic. Query it with topic_id + 0. Tokens that are not superseded come last.';

CREATE INDEX ledger_user ON tokenkeeper.ledger (user_id, (topic_id + 0)) WHERE user_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_user IS 'The tokens of a user, in one topic or in all. Query it with topic_id + 0.';

-- A registration whose tags stay the same does not change this index. fastupdate is off so that no registration has to merge a list of
-- pending entries. Tokens without tags are left out: each would be an entry of the same list of empty vectors.
CREATE INDEX ledger_tags ON tokenkeeper.ledger USING gin (tokenkeeper.tag_vector(tags)) WITH (fastupdate = off) WHERE tags <> '{}';
COMMENT ON INDEX tokenkeeper.ledger_tags IS
    'The tokens that an expression of tags matches. Query it with tag_vector(tags) @@ tag_query(...) AND tags <> ''{}''. The latter is right only if the '
    'expression does not match a token without tags: NOT tag_vector(NULL) @@ tag_query(...).';

-- PostgreSQL makes statistics of a partial index, and does not use them: it would take each tag for one that five in a thousand tokens have.
CREATE STATISTICS tokenkeeper.ledger_tag_vector ON (tokenkeeper.tag_vector(tags)) FROM tokenkeeper.ledger;
COMMENT ON STATISTICS tokenkeeper.ledger_tag_vector IS
    'How many tokens have which tag. So a campaign knows how many it expects, and finds few of many by the index ledger_tags.';

CREATE INDEX ledger_tag_changes ON tokenkeeper.ledger (device_id, (topic_id + 0)) WHERE tag_changes IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_tag_changes IS 'A device''s tokens with changes of tags. Query it with topic_id + 0.';

CREATE TABLE tokenkeeper.device (
    topic_id  integer NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    named_at  timestamptz NOT NULL DEFAULT '-infinity',
    token_key bytea NOT NULL DEFAULT '',
    tags_at   timestamptz,
    tags      text[] COLLATE "C",
    tags_of   bytea NOT NULL DEFAULT '',
    tag_changes tokenkeeper.tag_change[],
    PRIMARY KEY (topic_id, device_id)
) WITH (fillfactor = 90);
COMMENT ON TABLE tokenkeeper.device IS
    'One row per (topic, device). It is locked before the device''s tokens. It also remembers the registration that named the device last, if that '
    'token has moved to another device since. Pruned with the device''s last token.';
COMMENT ON COLUMN tokenkeeper.device.named_at IS
    'The latest registration that named this device; not kept for a token that still belongs to the device.';
COMMENT ON COLUMN tokenkeeper.device.token_key IS 'The token of that registration; empty if there was none, or it was forgotten.';
COMMENT ON COLUMN tokenkeeper.device.tags_at IS
    'The latest registration with tags among the device''s superseded tokens; null if there was none.';
COMMENT ON COLUMN tokenkeeper.device.tags IS
    'The tags of that registration. The device''s current token inherits them if it never had tags of its own. They outlive the token that had them.';
COMMENT ON COLUMN tokenkeeper.device.tags_of IS 'The token of that registration; empty if it was forgotten.';

COMMENT ON COLUMN tokenkeeper.device.tag_changes IS
    'The latest change of each tag that was addressed to the device, or to a token of it that was deleted since; null if there is none.';

CREATE INDEX device_token_key ON tokenkeeper.device (token_key) WHERE token_key <> '';
COMMENT ON INDEX tokenkeeper.device_token_key IS 'For forget.';

CREATE INDEX device_tags_of ON tokenkeeper.device (tags_of) WHERE tags_of <> '';
COMMENT ON INDEX tokenkeeper.device_tags_of IS 'For forget.';

CREATE TABLE tokenkeeper.early_tag_change (
    topic_id  integer NOT NULL,
    device_id text COLLATE "C" NOT NULL DEFAULT '',
    token_key bytea NOT NULL DEFAULT '',
    noted_at  timestamptz NOT NULL,
    PRIMARY KEY (topic_id, device_id, token_key)
);
COMMENT ON TABLE tokenkeeper.early_tag_change IS
    'Tokens and devices whose tags were changed before they were registered. The sweep deletes those that are still not registered after '
    'sweep.suppressed_retention.';
COMMENT ON COLUMN tokenkeeper.early_tag_change.device_id IS 'Empty if the change was addressed to a token.';
COMMENT ON COLUMN tokenkeeper.early_tag_change.token_key IS 'Empty if the change was addressed to a device.';
COMMENT ON COLUMN tokenkeeper.early_tag_change.noted_at IS 'The latest such call of tag (server clock).';

-- As on ledger_device: an expression, so that no plan uses the topic part of the primary key.
CREATE INDEX early_tag_change_noted ON tokenkeeper.early_tag_change ((topic_id + 0), noted_at);
COMMENT ON INDEX tokenkeeper.early_tag_change_noted IS 'For the sweep. Query it with topic_id + 0.';

CREATE TABLE tokenkeeper.crowded_device (
    topic_id   integer NOT NULL,
    device_id  text COLLATE "C" NOT NULL,
    tokens     integer NOT NULL,
    counted_at timestamptz NOT NULL,
    named_at   timestamptz NOT NULL,
    PRIMARY KEY (topic_id, device_id)
);
COMMENT ON TABLE tokenkeeper.crowded_device IS
    'One row per device_id with 50 or more tokens of a topic: such a device_id is probably a constant. status warns about those that were named '
    'within the last hour. Beyond 1000 tokens, tokens are registered without a device.';
COMMENT ON COLUMN tokenkeeper.crowded_device.tokens IS 'How many tokens it had when they were last counted, up to 1000.';
COMMENT ON COLUMN tokenkeeper.crowded_device.named_at IS 'The latest registration that named it, to ten minutes.';
