-- oldest daemon: 0.1.0
--
-- The ledger: what is known about each device token.
--
-- Each fact is the greatest value ever reported. Reports may therefore arrive late, twice and in any order (core/merge, function merged).
-- Three columns are derived and stored so that queries find them: logged_out_at, superseded_at and suppressed; and the table suppression.
--
-- One device, one token: a token is superseded while another token of its device has a later registered_at. Equal instants supersede nobody. A token
-- belongs to the device of its latest report that named one.
--
-- Collation: each text column with an index is COLLATE "C". Byte order survives an upgrade of glibc or ICU, and the caller's
-- collation cannot keep an index from being used.

-- Device tokens as people store them: parse_token reads them, for the gate, registrations, results, requests, attached tables and files. A token is read in
-- one way only, or not at all: what could be two tokens, or no token, is refused. Swift has the same rule for results: DeviceToken(spelled:). Versioned,
-- because indexes call token_key (see 0007_outbox).

CREATE FUNCTION tokenkeeper.parse_decorated_token(token text, base64 boolean) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Space, tab, line feed, carriage return.
    blank text COLLATE "C" := ' ' || chr(9) || chr(10) || chr(13);
    plain text COLLATE "C";
    in_base64 text COLLATE "C";
BEGIN
    -- 512 bytes as 'ab cd ...', with some room. Regular expressions on megabytes would take a second.
    IF token IS NULL OR octet_length(token) > 4096 THEN
        RETURN NULL;
    END IF;
    IF getdatabaseencoding() = 'UTF8' THEN
        -- Byte order mark (as in the first line of a file), no-break space. Not in an expression with CASE: chr is computed in advance, and fails in another
        -- encoding.
        blank := blank || chr(65279) || chr(160);
    END IF;
    plain := btrim(token COLLATE "C", blank);
    -- <abcdef01 23456789>: the description of NSData.
    IF plain ~ '^<.*>$' THEN
        plain := btrim(substr(plain, 2, length(plain) - 2), blank);
    END IF;
    -- 0x, and backslash x as PostgreSQL writes bytea.
    IF plain ~* '^0x' OR starts_with(plain, chr(92) || 'x') THEN
        plain := substr(plain, 3);
    END IF;
    -- AB-CD-EF and AB:CD:EF, byte by byte. Other groups are something else: a UUID, for example.
    IF plain ~ '^[0-9A-Fa-f]{2}(?:-[0-9A-Fa-f]{2})+$' OR plain ~ '^[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2})+$' THEN
        plain := translate(plain, '-:', '');
    ELSE
        plain := translate(plain, blank, '');
    END IF;
    IF octet_length(plain) > 1024 OR plain !~ '^(?:[0-9A-Fa-f]{2})+$' THEN
        plain := NULL;
    END IF;
    -- The base64 of 16 random bytes or more does not consist of hex digits only.
    IF base64 AND coalesce(octet_length(plain) < 32, true)
        AND token COLLATE "C" !~ '[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}' THEN
        in_base64 := translate(token COLLATE "C", '-_' || blank, '+/');
        IF in_base64 ~ '^[0-9A-Za-z+/]+={0,2}$' AND (strpos(in_base64, '=') = 0 OR octet_length(in_base64) % 4 = 0) THEN
            in_base64 := rtrim(in_base64, '=');
            IF octet_length(in_base64) % 4 <> 1 AND octet_length(in_base64) * 3 / 4 BETWEEN 1 AND 512 THEN
                RETURN encode(decode(in_base64 || repeat('=', -octet_length(in_base64) & 3), 'base64'), 'hex');
            END IF;
        END IF;
    END IF;
    RETURN lower(plain);
END
$$;
COMMENT ON FUNCTION tokenkeeper.parse_decorated_token(text, boolean) IS
    'Internal: the part of parse_token for what is not plain hex.';

-- One expression, which the planner puts in place of the call: plain hex costs a regular expression and no call.
CREATE FUNCTION tokenkeeper.parse_token(token text, base64 boolean DEFAULT false) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN octet_length(token) <= 1024 AND token COLLATE "C" ~ '^(?:[0-9A-Fa-f]{2})+$' AND (base64 IS NOT TRUE OR octet_length(token) >= 32)
    THEN lower(token COLLATE "C")
    ELSE tokenkeeper.parse_decorated_token(token, base64)
END;
COMMENT ON FUNCTION tokenkeeper.parse_token(text, boolean) IS
    'A device token in lower-case hex, as the ledger writes it. Reads hex in either case; <abcdef01 23456789>, as NSData describes itself; with spaces; '
    'after 0x or a backslash and x; and with dashes or colons between the bytes. With base64 => true also base64 and base64url, with or without padding; '
    'a text that is both hex and base64 is then base64, except for 32 or more hex digits. Null for anything else, or if it is not 1 to 512 bytes: '
    'token_fault says why. Never raises an error.';

CREATE FUNCTION tokenkeeper.token_key(token text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- As parse_token, without lower(), which would cost the gate a tenth.
RETURN decode(CASE
    WHEN octet_length(token) <= 1024 AND token COLLATE "C" ~ '^(?:[0-9A-Fa-f]{2})+$' THEN token
    ELSE tokenkeeper.parse_decorated_token(token, false)
END, 'hex');
COMMENT ON FUNCTION tokenkeeper.token_key(text) IS 'The bytes of a device token, to look it up by index. Null if parse_token cannot read it.';

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
    'A token''s tags for the operator @@ with tag_query. Null gives the empty vector, so !muted matches a token without tags.';

CREATE TABLE tokenkeeper.ledger (
    registered_at          timestamptz NOT NULL DEFAULT '-infinity',
    stale_at               timestamptz,
    suspect_at             timestamptz,
    unregistered_by_app_at timestamptz,
    returned_at            timestamptz,
    logged_out_at          timestamptz GENERATED ALWAYS AS (CASE WHEN returned_at >= unregistered_by_app_at THEN NULL ELSE unregistered_by_app_at END) STORED,
    superseded_at          timestamptz,
    topic_id               integer NOT NULL,
    suppressed             boolean NOT NULL GENERATED ALWAYS AS (
        coalesce(greatest(stale_at, suspect_at, CASE WHEN returned_at >= unregistered_by_app_at THEN NULL ELSE unregistered_by_app_at END,
                          superseded_at) >= registered_at, false)) STORED,
    unresolved             boolean NOT NULL DEFAULT false,
    of_constant            boolean NOT NULL DEFAULT false,
    token_key              bytea NOT NULL,
    stale_reason           text COLLATE "C",
    suspect_reason         text COLLATE "C",
    device_id              text COLLATE "C",
    tags                   text[] COLLATE "C",
    user_id                text COLLATE "C",
    device_at              timestamptz,
    user_at                timestamptz,
    tags_at                timestamptz,
    PRIMARY KEY (topic_id, token_key)
)
-- Leaves room on each page for the next version of a row. No index has a column that says whether a token is suppressed, so a registration and a 410 change
-- no index (a HOT update).
WITH (fillfactor = 90);
COMMENT ON TABLE tokenkeeper.ledger IS
    'One row per (topic, token). Never change it by hand; to read it, use the view token. It has no foreign key to topic, which would lock one hot row per '
    'registration: reap_topics keeps each topic that has a row here.';
COMMENT ON COLUMN tokenkeeper.ledger.registered_at IS 'The latest registration; -infinity if there was none, because null would slip through comparisons.';
COMMENT ON COLUMN tokenkeeper.ledger.stale_at IS 'APNs'' timestamp of the latest 410 with a reason and a timestamp.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_at IS 'When the request of the latest suspect that counts was sent, such as one with BadDeviceToken.';
COMMENT ON COLUMN tokenkeeper.ledger.unregistered_by_app_at IS 'The latest logout.';
COMMENT ON COLUMN tokenkeeper.ledger.returned_at IS
    'When a logout was last taken back: a flag is on again, or a row is there again. It revives no 410 and supersedes nobody.';
COMMENT ON COLUMN tokenkeeper.ledger.logged_out_at IS 'The latest logout that was not taken back. It suppresses if it is not earlier than registered_at.';
COMMENT ON COLUMN tokenkeeper.ledger.superseded_at IS
    'Set when another token of the device has a later registered_at; deleting that token changes nothing. The value is the token''s own registered_at, the '
    'earliest instant that suppresses, so any other cause takes precedence.';
COMMENT ON COLUMN tokenkeeper.ledger.unresolved IS
    'True if the device may have a second current token: this one is not compared yet, or another one has the same registered_at. The next registration of '
    'this token compares them: see resolve_devices.';
COMMENT ON COLUMN tokenkeeper.ledger.of_constant IS
    'True if the device_id was found to be a constant, with more than 20 tokens, while it had this one. It supersedes none of them.';
COMMENT ON COLUMN tokenkeeper.ledger.suppressed IS 'The one rule: true if an instant of suppression is not earlier than the registration.';
COMMENT ON COLUMN tokenkeeper.ledger.token_key IS 'The bytes of the device token: see token_key(text).';
COMMENT ON COLUMN tokenkeeper.ledger.stale_reason IS 'The reason of the 410 at stale_at; on a tie, the greatest text.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_reason IS 'As stale_reason, for suspect_at.';
COMMENT ON COLUMN tokenkeeper.ledger.device_at IS 'When device_id was last named or cleared.';
COMMENT ON COLUMN tokenkeeper.ledger.user_at IS 'When user_id was last named or cleared.';
COMMENT ON COLUMN tokenkeeper.ledger.tags_at IS 'The instant of tags, which may have been reported for another token of the device.';
COMMENT ON COLUMN tokenkeeper.ledger.tags IS 'Null if none were ever reported.';

-- topic_id is an expression here, and the functions compare topic_id + 0. Otherwise a plan made for a small ledger would use the topic
-- part of the primary key, and would read the whole topic after the ledger has grown.
CREATE INDEX ledger_device ON tokenkeeper.ledger (device_id, (topic_id + 0), of_constant) WHERE device_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_device IS 'The tokens of a device in a topic. Query it with topic_id + 0.';

CREATE INDEX ledger_user ON tokenkeeper.ledger (user_id, (topic_id + 0)) WHERE user_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_user IS 'The tokens of a user, in one topic or in all. Query it with topic_id + 0.';

-- A registration whose tags stay the same does not change this index. fastupdate is off so that no registration has to merge a list of
-- pending entries. Tokens without tags are left out: each would be an entry of the same list of empty vectors.
CREATE INDEX ledger_tags ON tokenkeeper.ledger USING gin (tokenkeeper.tag_vector(tags)) WITH (fastupdate = off) WHERE tags <> '{}';
COMMENT ON INDEX tokenkeeper.ledger_tags IS
    'The tokens that a tag expression matches. Query it with tag_vector(tags) @@ tag_query(...) AND tags <> ''{}''. The latter is right only if the '
    'expression does not match a token without tags: NOT tag_vector(NULL) @@ tag_query(...).';

-- PostgreSQL makes statistics of a partial index, and does not use them: it would take each tag for one that five in a thousand tokens have.
CREATE STATISTICS tokenkeeper.ledger_tag_vector ON (tokenkeeper.tag_vector(tags)) FROM tokenkeeper.ledger;
COMMENT ON STATISTICS tokenkeeper.ledger_tag_vector IS 'How many tokens have which tag: for the expected size of a campaign, and for the use of ledger_tags.';

-- Derived ----------------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.suppression (
    since     timestamptz NOT NULL,
    topic_id  integer NOT NULL,
    token_key bytea NOT NULL,
    PRIMARY KEY (topic_id, token_key)
);
COMMENT ON TABLE tokenkeeper.suppression IS
    'One row per token for which ledger.suppressed is true. The functions that change ledger.suppressed write it; a trigger deletes the row with the token. '
    'The gate finds tokens here, and the sweep those that are due.';
COMMENT ON COLUMN tokenkeeper.suppression.since IS
    'When the ledger learned of the suppression (server clock). The retention starts here: the timestamp of a 410 may be older than the retention when it '
    'arrives.';

-- As ledger_device: no look-up by the key must find this index suitable.
CREATE INDEX suppression_since ON tokenkeeper.suppression ((topic_id + 0), since);
COMMENT ON INDEX tokenkeeper.suppression_since IS 'The suppressed tokens in the order in which the sweep prunes them. Query it with topic_id + 0.';

CREATE TABLE tokenkeeper.token_count (
    tokens     bigint NOT NULL,
    topic_id   integer NOT NULL,
    registered boolean NOT NULL,
    state      text COLLATE "C" NOT NULL
);
COMMENT ON TABLE tokenkeeper.token_count IS 'How many tokens are in each state, exactly: the sum of the rows. A row may be negative.';
COMMENT ON COLUMN tokenkeeper.token_count.registered IS 'False: known only by results or a logout.';

-- A publication for all tables needs one. Rows are deleted when equal ones are added up.
ALTER TABLE tokenkeeper.token_count REPLICA IDENTITY FULL;
CREATE INDEX token_count_topic ON tokenkeeper.token_count (topic_id);

-- Reports ----------------------------------------------------------------------------------------------------------

CREATE TYPE tokenkeeper.token_report AS (
    n              integer,
    topic_id       integer,
    token_key      bytea,
    one_token      boolean,
    registered_at  timestamptz,
    returned_at    timestamptz,
    device_id      text COLLATE "C",
    device_at      timestamptz,
    user_id        text COLLATE "C",
    user_at        timestamptz,
    tags           text[] COLLATE "C",
    tags_at        timestamptz,
    cause          text COLLATE "C",
    invalidated_at timestamptz,
    reason         text COLLATE "C",
    received_at    timestamptz,
    released       boolean,
    source_id      bigint
);
COMMENT ON TYPE tokenkeeper.token_report IS
    'What a registration, a logout or a result says about one token: facts, each with its instant. n is its position in a batch; one_token is '
    'has_one_token_per_device of the topic. A null device_id or user_id says nothing, an empty one clears. cause (stale, suspect, unregistered_by_app or '
    'null): the token is invalid since invalidated_at, received at received_at; a logout with a user_id counts only if the token is not another user''s by '
    'then.';

CREATE TYPE tokenkeeper.device_check AS (
    topic_id  integer,
    device_id text COLLATE "C",
    token_key bytea,
    is_new    boolean
);
COMMENT ON TYPE tokenkeeper.device_check IS
    'A device whose tokens must be compared. token_key is the reported token; null if it has left the device. is_new: the token is new to the device, so '
    'nothing is to be done if it is the only one.';

CREATE TYPE tokenkeeper.new_registration AS (
    token         text,
    topic         text,
    environment   text,
    registered_at timestamptz,
    device_id     text,
    tags          text[],
    user_id       text,
    unregistered  boolean
);
COMMENT ON TYPE tokenkeeper.new_registration IS
    'An element of the array for register: its arguments in their order; null means the default. If unregistered is true, it is a logout, with the arguments '
    'of unregister.';

-- A column of such a type in a table of somebody else would keep us from changing it.
REVOKE USAGE ON TYPE tokenkeeper.ledger, tokenkeeper.token_report, tokenkeeper.device_check, tokenkeeper.new_registration FROM PUBLIC;
