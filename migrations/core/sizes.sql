-- How large a row may be that others write into one of our tables.
--
-- Whoever may insert into a queue can make a row of gigabytes out of a few megabytes, because PostgreSQL stores long texts compressed, and out of line. So a
-- length is asked for without reading the text (octet_length of text does not), lengths are added up as bigint, and a row that is too long is never read
-- whole: it is rejected with its lengths and the first 1024 characters of each text.
--
-- In SQL, not plpgsql: plpgsql reads an array as soon as it is an argument. Since version 18, PostgreSQL also reads each argument of an SQL function that it
-- cannot replace by its expression. So what gets a text before its length is known has no subquery, and says STABLE if its expression is.

CREATE OR REPLACE FUNCTION tokenkeeper.largest_row() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 16777216;
COMMENT ON FUNCTION tokenkeeper.largest_row() IS
    'How many bytes of text a row of send_result, registration or send_request, or the arguments of enqueue, may have. A longer row is rejected.';

CREATE OR REPLACE FUNCTION tokenkeeper.most_stored() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1048576;
COMMENT ON FUNCTION tokenkeeper.most_stored() IS
    'Internal: how many bytes the tags of a registration or the payload of a request may take as stored. To know their length, they must be read, and '
    'compressed they may be up to 255 times as long. Usable ones are shorter.';

CREATE OR REPLACE FUNCTION tokenkeeper.length_of_read_tags(tags text[]) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT sum(octet_length(t)) FROM unnest(tags) AS t);
COMMENT ON FUNCTION tokenkeeper.length_of_read_tags(text[]) IS 'Internal, for length_of_tags: the bytes of tags, which are read.';

CREATE OR REPLACE FUNCTION tokenkeeper.length_of_tags(tags text[]) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(tags) > tokenkeeper.most_stored() THEN pg_column_size(tags)
            -- Nulls are bits: 192 kB as stored can be a hundred million of them.
            WHEN cardinality(tags) > 100000 THEN 1024 * cardinality(tags)::bigint
            ELSE tokenkeeper.length_of_read_tags(tags) END;
COMMENT ON FUNCTION tokenkeeper.length_of_tags(text[]) IS
    'Internal: the bytes of tags. Of those over most_stored, the size as stored, and of over 100,000 tags, 1024 for each: they are not read.';

CREATE OR REPLACE FUNCTION tokenkeeper.length_of_payload(payload json) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(payload) > tokenkeeper.most_stored() THEN pg_column_size(payload)
            ELSE octet_length(payload::text) END;
COMMENT ON FUNCTION tokenkeeper.length_of_payload(json) IS
    'Internal: the bytes of a payload as written. Of one over most_stored, the size as stored: it is not read.';

CREATE OR REPLACE FUNCTION tokenkeeper.first_tag(tags text[]) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- Not in FROM, which would copy all of them.
RETURN ARRAY(SELECT left(t.tag, 1024) FROM (SELECT unnest(tags) AS tag LIMIT 1) AS t);
COMMENT ON FUNCTION tokenkeeper.first_tag(text[]) IS 'Internal, for cut_tags: the beginning of the first one.';

CREATE OR REPLACE FUNCTION tokenkeeper.cut_tags(tags text[]) RETURNS text[]
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(tags) <= tokenkeeper.most_stored() THEN tokenkeeper.first_tag(tags) END;
COMMENT ON FUNCTION tokenkeeper.cut_tags(text[]) IS
    'What is kept of tags that are too long: the beginning of the first one; nothing of tags over most_stored.';

CREATE OR REPLACE FUNCTION tokenkeeper.cut_payload(payload json) RETURNS json
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_size(payload) <= tokenkeeper.most_stored() THEN to_json(left(payload::text, 1024)) END;
COMMENT ON FUNCTION tokenkeeper.cut_payload(json) IS
    'Internal: what is kept of a payload that is too long: its beginning, as a JSON string; nothing of one over most_stored.';

CREATE OR REPLACE FUNCTION tokenkeeper.size_words(names text[], lengths bigint[], subject text DEFAULT 'the row is') RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT subject || ' too long: ' || sum(c.length) || ' bytes, expected at most ' || tokenkeeper.largest_row() || ': '
            || string_agg(c.name || ' ' || c.length, ', ' ORDER BY c.place)
            || CASE WHEN sum(c.length) <= tokenkeeper.largest_row()
                    THEN ', as it is stored, expected at most ' || tokenkeeper.most_stored() ELSE '' END
        FROM unnest(names, lengths) WITH ORDINALITY AS c (name, length, place) WHERE c.length IS NOT NULL);
COMMENT ON FUNCTION tokenkeeper.size_words(text[], bigint[], text) IS
    'Internal: the message about a row that is too long, with the length of each column. Tags or a payload, which come last, may be within largest_row and '
    'still over most_stored.';

CREATE OR REPLACE FUNCTION tokenkeeper.result_size_fault(
    environment text, topic text, token text, status text, body text, apns_id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN 0::bigint + coalesce(octet_length(environment), 0) + coalesce(octet_length(topic), 0) + coalesce(octet_length(token), 0)
                 + coalesce(octet_length(status), 0) + coalesce(octet_length(body), 0) + coalesce(octet_length(apns_id), 0) > tokenkeeper.largest_row()
            THEN tokenkeeper.size_words(
                '{environment,topic,token,status,body,apns_id}',
                ARRAY[octet_length(environment), octet_length(topic), octet_length(token), octet_length(status), octet_length(body), octet_length(apns_id)]::bigint[])
            END;
COMMENT ON FUNCTION tokenkeeper.result_size_fault(text, text, text, text, text, text) IS
    'The message about a result that is too long; null if it is not. Reads none of its texts.';

CREATE OR REPLACE FUNCTION tokenkeeper.registration_size_fault(
    environment text, topic text, token text, device_id text, user_id text, row_key text, tags text[]) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN coalesce(pg_column_size(tags), 0) > tokenkeeper.most_stored()
                 OR 0::bigint + coalesce(octet_length(environment), 0) + coalesce(octet_length(topic), 0) + coalesce(octet_length(token), 0)
                    + coalesce(octet_length(device_id), 0) + coalesce(octet_length(user_id), 0) + coalesce(octet_length(row_key), 0)
                    + coalesce(tokenkeeper.length_of_tags(tags), 0) > tokenkeeper.largest_row()
            THEN tokenkeeper.size_words(
                '{environment,topic,token,device_id,user_id,row_key,tags}',
                ARRAY[octet_length(environment), octet_length(topic), octet_length(token), octet_length(device_id), octet_length(user_id),
                      octet_length(row_key), tokenkeeper.length_of_tags(tags)])
            END;
COMMENT ON FUNCTION tokenkeeper.registration_size_fault(text, text, text, text, text, text, text[]) IS 'As result_size_fault, for a registration.';

CREATE OR REPLACE FUNCTION tokenkeeper.request_size_fault(
    environment text, topic text, token text, push_type text, collapse_id text, payload json) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN coalesce(pg_column_size(payload), 0) > tokenkeeper.most_stored()
                 OR 0::bigint + coalesce(octet_length(environment), 0) + coalesce(octet_length(topic), 0) + coalesce(octet_length(token), 0)
                    + coalesce(octet_length(push_type), 0) + coalesce(octet_length(collapse_id), 0) + coalesce(tokenkeeper.length_of_payload(payload), 0)
                    > tokenkeeper.largest_row()
            THEN tokenkeeper.size_words(
                '{environment,topic,token,push_type,collapse_id,payload}',
                ARRAY[octet_length(environment), octet_length(topic), octet_length(token), octet_length(push_type), octet_length(collapse_id),
                      tokenkeeper.length_of_payload(payload)])
            END;
COMMENT ON FUNCTION tokenkeeper.request_size_fault(text, text, text, text, text, json) IS 'Internal: as result_size_fault, for a request.';

CREATE OR REPLACE FUNCTION tokenkeeper.arguments_fault(names text[], lengths bigint[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN (SELECT sum(l) FROM unnest(lengths) AS l) > tokenkeeper.largest_row() THEN tokenkeeper.size_words(names, lengths, 'the arguments are') END;
COMMENT ON FUNCTION tokenkeeper.arguments_fault(text[], bigint[]) IS
    'Internal: the message about arguments of a function that are longer than largest_row together; null if they are not.';
