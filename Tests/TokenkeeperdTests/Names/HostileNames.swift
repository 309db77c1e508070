import Foundation
import LedgerTestSupport

/// Functions, operators and aggregates that an attacker could make: for each name that our SQL uses, those whose arguments match some call more
/// closely than PostgreSQL's own. Each writes a line into the server's log, in whoever's session it is executed.
enum HostileNames {
    static let mark = "TRAPPED"

    /// The words and operators in all SQL of ours, and in whatever stands around it.
    static func used() throws -> (words: [String], operators: [String]) {
        let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../../..")
            .standardized
        var (words, operators): (Set<String>, Set<String>) = ([], [])
        for folder in ["Sources/TokenLedger", "Sources/tokenkeeperd", "migrations"] {
            let path = root.appendingPathComponent(folder).path
            guard let files = FileManager.default.enumerator(atPath: path) else { throw TestFailure("no \(path)") }
            for case let file as String in files where file.hasSuffix(".swift") || file.hasSuffix(".sql") {
                let text = try String(contentsOfFile: "\(path)/\(file)", encoding: .utf8)
                for word in text.split(whereSeparator: { !$0.isASCII || !($0.isLetter || $0.isNumber || $0 == "_") }) {
                    words.insert(word.lowercased())
                }
                for sign in text.split(whereSeparator: { !"+-*/<>=~!@#%^&|?".contains($0) }) {
                    operators.insert(String(sign))
                }
            }
        }
        // What LIKE, and its kin, are.
        return (words.sorted(), operators.union(["~~", "!~~", "~~*", "!~~*"]).sorted())
    }

    /// Creates them in a schema.
    static func create(in schema: String, of database: TestDatabase) throws {
        let (words, operators) = try used()
        try database.psql(
            """
            SET search_path = pg_catalog; SET check_function_bodies = off; SET client_min_messages = error;
            SELECT set_config('trap.schema', '\(schema)', false), set_config('trap.words', '\(words.joined(separator: " "))', false),
                   set_config('trap.operators', '\(operators.joined(separator: " "))', false);
            \(script)
            """, user: "postgres")
    }

    private static let script = #"""
        DO $$
        DECLARE
            here text := current_setting('trap.schema');
            words text[] := string_to_array(current_setting('trap.words'), ' ');
            signs text[] := string_to_array(current_setting('trap.operators'), ' ');
            kinds oid[] := ARRAY['text', 'text[]', 'int4', 'int8', 'int2', 'bool', 'timestamptz', 'interval', 'bytea', 'jsonb', 'json', 'name', 'oid',
                                 'regclass', '"char"', 'float8', 'numeric', 'int8[]', 'int4[]', 'bytea[]', 'varchar']::regtype[]::oid[];
            body text;
            f record;
            made bigint := 0;
        BEGIN
            body := 'LANGUAGE plpgsql SET search_path = pg_catalog AS ''BEGIN RAISE LOG ''''TRAPPED %'''', ''''%s'''';RETURN NULL; END''';
            FOR f IN
                WITH polymorphic (type, is_array) AS (
                    VALUES ('anyelement'::regtype::oid, false), ('anynonarray'::regtype::oid, false), ('anycompatible'::regtype::oid, false),
                           ('anycompatiblenonarray'::regtype::oid, false), ('anyenum'::regtype::oid, false), ('"any"'::regtype::oid, false),
                           ('anyarray'::regtype::oid, true), ('anycompatiblearray'::regtype::oid, true)
                ), known AS (
                    SELECT p.oid, p.proname::text AS name, p.prokind, p.proretset, p.prorettype, p.provariadic,
                           ARRAY(SELECT t FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, n) ORDER BY n) AS types
                    FROM pg_proc AS p
                    WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind IN ('f', 'a') AND p.proname = ANY (words) AND p.pronargs BETWEEN 1 AND 8
                      AND NOT ('internal'::regtype = ANY (p.proargtypes::oid[]) OR 'cstring'::regtype = ANY (p.proargtypes::oid[]))
                      AND NOT EXISTS (SELECT FROM pg_aggregate AS g WHERE g.aggfnoid = p.oid AND g.aggkind <> 'n')
                ), concrete AS (
                    -- anyarray and its like, with each type.
                    SELECT k.name, k.prokind, k.proretset,
                           CASE WHEN EXISTS (SELECT FROM polymorphic AS y WHERE y.type = k.prorettype AND y.is_array) THEN e.typarray
                                WHEN EXISTS (SELECT FROM polymorphic AS y WHERE y.type = k.prorettype) THEN e.oid ELSE k.prorettype END AS result,
                           ARRAY(SELECT CASE WHEN y.is_array THEN e.typarray WHEN y.type IS NOT NULL THEN e.oid ELSE a.t END
                                 FROM unnest(k.types) WITH ORDINALITY AS a (t, n) LEFT JOIN polymorphic AS y ON y.type = a.t ORDER BY a.n) AS types
                    FROM known AS k CROSS JOIN (SELECT t.oid, t.typarray FROM pg_type AS t WHERE t.oid = ANY (kinds) AND t.typarray <> 0) AS e
                    WHERE k.provariadic = 0 AND EXISTS (SELECT FROM polymorphic AS y WHERE y.type = ANY (k.types))
                    UNION
                    -- An argument of a type that PostgreSQL would convert.
                    SELECT k.name, k.prokind, k.proretset, k.prorettype, k.types[:i - 1] || c.castsource || k.types[i + 1:]
                    FROM known AS k CROSS JOIN generate_series(1, cardinality(k.types)) AS i
                    JOIN (SELECT castsource, casttarget FROM pg_cast WHERE castcontext = 'i' UNION VALUES ('varchar'::regtype::oid, 'text'::regtype::oid)) AS c
                      ON c.casttarget = k.types[i] AND c.castsource = ANY (kinds)
                    WHERE k.provariadic = 0
                    UNION
                    -- VARIADIC "any": one to eight texts, or one value of another type and texts.
                    SELECT k.name, k.prokind, k.proretset, k.prorettype, k.types[:cardinality(k.types) - 1] || e || array_fill('text'::regtype::oid, ARRAY[i])
                    FROM known AS k CROSS JOIN generate_series(0, 7) AS i CROSS JOIN unnest(kinds) AS e
                    WHERE k.provariadic <> 0 AND (i < 3 OR e = 'text'::regtype)
                )
                SELECT c.name, c.prokind, c.proretset,
                       CASE WHEN c.result IN (SELECT t.oid FROM pg_type AS t WHERE t.typtype = 'p' AND t.typname <> 'void') OR c.result = 0
                            THEN 'text'::regtype ELSE c.result::regtype END AS result,
                       array_to_string(c.types::regtype[], ', ') AS arguments
                FROM concrete AS c
                WHERE NOT 0 = ANY (c.types) AND NOT EXISTS (SELECT FROM pg_type AS t WHERE t.oid = ANY (c.types) AND t.typtype = 'p')
                  AND NOT EXISTS (SELECT FROM pg_proc AS o WHERE o.pronamespace = 'pg_catalog'::regnamespace AND o.proname = c.name
                                  AND array_to_string(o.proargtypes::oid[], ' ') = array_to_string(c.types, ' '))
            LOOP
                BEGIN
                    IF f.prokind = 'a' THEN
                        EXECUTE format('CREATE OR REPLACE FUNCTION %I.step_of(state int8, %s) RETURNS int8 ', here,
                                       (SELECT string_agg('x' || n || ' ' || t, ', ') FROM unnest(string_to_array(f.arguments, ', ')) WITH ORDINALITY AS a (t, n)))
                            || replace(body, '%s', f.name);
                        EXECUTE format('CREATE AGGREGATE %I.%I (%s) (SFUNC = %I.step_of, STYPE = int8)', here, f.name, f.arguments, here);
                    ELSE
                        EXECUTE format('CREATE FUNCTION %I.%I(%s) RETURNS %s %s ', here, f.name, f.arguments, CASE WHEN f.proretset THEN 'SETOF' ELSE '' END, f.result)
                            || CASE WHEN f.proretset OR f.result = 'void'::regtype THEN replace(replace(body, '%s', f.name), 'RETURN NULL;', 'RETURN;')
                                    ELSE replace(body, '%s', f.name) END;
                    END IF;
                    made := made + 1;
                EXCEPTION WHEN duplicate_function OR invalid_function_definition THEN
                    NULL;
                END;
            END LOOP;
            -- Operators for two types that PostgreSQL would convert, or take as anyarray and its like.
            CREATE TEMPORARY TABLE accepted AS
                SELECT castsource AS given, casttarget AS type FROM pg_cast WHERE castcontext = 'i' AND castsource = ANY (kinds)
                UNION SELECT k, k FROM unnest(kinds) AS k
                UNION SELECT 'varchar'::regtype, 'text'::regtype
                UNION SELECT k, y::regtype FROM unnest(kinds) AS k, unnest('{anyelement,anycompatible,anynonarray,anycompatiblenonarray}'::text[]) AS y
                UNION SELECT t.oid, y::regtype FROM pg_type AS t, unnest('{anyarray,anycompatiblearray}'::text[]) AS y
                WHERE t.oid = ANY (kinds) AND t.typcategory = 'A';
            FOR f IN
                SELECT o.oprname, l.given::regtype AS of_left, r.given::regtype AS of_right,
                       bool_or(o.oprresult = 'bool'::regtype) AS decides, (array_agg(l.given))[1]::regtype AS other
                FROM pg_operator AS o JOIN accepted AS l ON l.type = o.oprleft JOIN accepted AS r ON r.type = o.oprright
                WHERE o.oprname = ANY (signs) AND o.oprkind = 'b'
                  AND NOT EXISTS (SELECT FROM pg_operator AS x WHERE x.oprname = o.oprname AND x.oprleft = l.given AND x.oprright = r.given)
                GROUP BY 1, 2, 3
            LOOP
                f.other := CASE WHEN f.decides THEN 'bool'::regtype ELSE f.other END;
                IF to_regprocedure(format('%I.operate_%s(%s, %s)', here, f.other::oid, f.of_left, f.of_right)) IS NULL THEN
                    EXECUTE format('CREATE FUNCTION %I.operate_%s(%s, %s) RETURNS %s ', here, f.other::oid, f.of_left, f.of_right, f.other)
                        || replace(body, '%s', 'operator');
                END IF;
                EXECUTE format('CREATE OPERATOR %I.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = %I.operate_%s)', here, f.oprname, f.of_left, f.of_right,
                               here, f.other::oid);
                made := made + 1;
            END LOOP;
            DROP TABLE accepted;
            -- A cast needs a type of one's own.
            EXECUTE format('CREATE TYPE %I.text AS (value int4)', here);
            EXECUTE format('CREATE FUNCTION %I.cast_text(%I.text) RETURNS pg_catalog.text ', here, here) || replace(body, '%s', 'cast');
            EXECUTE format('CREATE CAST (%I.text AS pg_catalog.text) WITH FUNCTION %I.cast_text(%I.text) AS IMPLICIT', here, here, here);
            IF made < 1000 THEN
                RAISE EXCEPTION 'only % traps', made;
            END IF;
        END
        $$
        """#
}
