-- oldest daemon: 0.1.0
--
-- Complete lists: files that `import --complete` reads. What is in a list today and was not in it yesterday is back; what is gone from it is logged out.

CREATE TABLE tokenkeeper.list (
    list_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text COLLATE "C" NOT NULL UNIQUE,
    done_by     text NOT NULL DEFAULT session_user,
    source_id   bigint NOT NULL REFERENCES tokenkeeper.registration_source,
    as_of       timestamptz NOT NULL,
    is_known    boolean NOT NULL DEFAULT false,
    advanced_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tokenkeeper.list IS 'The complete lists that were imported, by the names given to import --complete. drop_list removes one.';
COMMENT ON COLUMN tokenkeeper.list.done_by IS 'The login that imports it. No other may.';
COMMENT ON COLUMN tokenkeeper.list.source_id IS 'The latest import of the list. An earlier one cannot go on.';
COMMENT ON COLUMN tokenkeeper.list.as_of IS 'When the latest file was true.';
COMMENT ON COLUMN tokenkeeper.list.is_known IS
    'Whether list_member has what was in the list: an import has finished, and none was withdrawn since. If not, nothing is gone, and nothing is back.';
COMMENT ON COLUMN tokenkeeper.list.advanced_at IS 'When an import last queued a part of it.';

CREATE TABLE tokenkeeper.list_member (
    list_id     bigint NOT NULL,
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    token_key   bytea NOT NULL,
    seen_by     bigint NOT NULL,
    PRIMARY KEY (list_id, topic, environment, token_key)
) WITH (fillfactor = 60);
COMMENT ON TABLE tokenkeeper.list_member IS 'The tokens of each complete list.';
COMMENT ON COLUMN tokenkeeper.list_member.seen_by IS 'The source_id of the latest import that had it. No index has this column: each import changes it in all rows.';

CREATE INDEX list_member_token ON tokenkeeper.list_member (token_key);
COMMENT ON INDEX tokenkeeper.list_member_token IS 'For forget.';

ALTER TABLE tokenkeeper.registration_source ADD COLUMN list text COLLATE "C", ADD COLUMN as_of timestamptz CHECK ((as_of IS NOT NULL) = (list IS NOT NULL));
COMMENT ON COLUMN tokenkeeper.registration_source.list IS 'The complete list that the file is.';
COMMENT ON COLUMN tokenkeeper.registration_source.as_of IS 'When that list was true: logouts, returns, devices, users and tags count as of then.';
