import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `Rows are decoded in order` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private struct Animal: Equatable {
        var name: String
        var legs: Int32
        var owner: String?
        var isTame: Bool
        var weight: Int64?
        var seen: Instant
    }

    @Test func `a double precision is read as it is stored`() throws {
        var connection = try database.connect()
        let values = try connection.query("SELECT unnest('{0,-1.5,1e300,1795553070.123457}'::float8[])").values(
            Double.self)
        #expect(values == [0, -1.5, 1e300, 1795553070.123457])
        let error = #expect(throws: DatabaseError.self) { _ = try connection.query("SELECT 1").values(Double.self) }
        #expect(error?.message.contains("is not a binary double precision") == true)
    }

    @Test func `each column is read as the type of its field`() throws {
        var connection = try database.connect()
        let animals = try connection.query(
            """
            SELECT name, legs, owner, tame, weight, seen FROM (VALUES
                ('cat', 4::smallint, 'Ann', true, 4000::bigint, '1970-01-01 00:00:01Z'::timestamptz),
                ('hen', 2::smallint, NULL, false, NULL, 'infinity')) AS a (name, legs, owner, tame, weight, seen)
            """
        ).decode { row throws(DatabaseError) in
            Animal(
                name: try row.read(), legs: try row.read(), owner: try row.read(), isTame: try row.read(),
                weight: try row.read(), seen: try row.read())
        }
        #expect(
            animals == [
                Animal(
                    name: "cat", legs: 4, owner: "Ann", isTame: true, weight: 4000,
                    seen: Instant(microseconds: 1_000_000)),
                Animal(name: "hen", legs: 2, owner: nil, isTame: false, weight: nil, seen: .distantFuture),
            ])
    }

    @Test func `numbers keep their sign and their range, in binary and in text`() throws {
        var connection = try database.connect()
        let numbers = "SELECT n FROM unnest('{-9223372036854775808,-1,0,1,9223372036854775807}'::bigint[]) AS n"
        for rows in [try connection.query(numbers).values(Int64.self), try connection.run(numbers).values()] {
            #expect(rows == [.min, -1, 0, 1, .max])
        }
        #expect(try connection.query("SELECT (-2)::smallint").value(Int32.self) == -2)
        #expect(try connection.run("SELECT true").value(Bool.self))
        #expect(try connection.run("SELECT false").value(Bool.self) == false)
    }

    @Test func `a missing row is nil if it is optional, and an error if it is required`() throws {
        var connection = try database.connect()
        #expect(
            try connection.query("SELECT 1 WHERE false").first { row throws(DatabaseError) in try row.read(Int.self) }
                == nil)
        #expect(try connection.query("SELECT NULL::int").value(Int?.self) == nil)
        #expect(throws: DatabaseError(.unexpectedRow, "0 rows were returned instead of one by: SELECT 1 WHERE false")) {
            _ = try connection.query("SELECT 1 WHERE false").value(Int.self)
        }
        #expect(throws: DatabaseError.self) {
            _ = try connection.query("SELECT 1 UNION ALL SELECT 2").first { row throws(DatabaseError) in
                try row.read(Int.self)
            }
        }
    }

    private enum Size: String, ColumnDecodable { case small, large }

    @Test func `a word outside its fixed set is an error`() throws {
        var connection = try database.connect()
        #expect(try connection.query("SELECT 'large'").value(Size.self) == .large)
        #expect(try connection.query("SELECT NULL::text").value(Size?.self) == nil)
        #expect(
            throws: DatabaseError(
                .unexpectedRow,
                "column 1 (size) has the unknown value \"huge\", in the result of: SELECT 'huge' AS size")
        ) { _ = try connection.query("SELECT 'huge' AS size").value(Size.self) }
    }

    /// Reads a text and an integer.
    private func readPair(_ statement: String, on connection: inout Connection) throws {
        _ = try connection.query(statement).decode { row throws(DatabaseError) in
            (try row.read(String.self), try row.read(Int64.self))
        }
    }

    @Test(arguments: [
        ("SELECT 'a' AS name, NULL::bigint AS legs", "column 2 (legs) is null"),
        ("SELECT NULL::text AS name, 1 AS legs", "column 1 (name) is null"),
        ("SELECT 'a' AS name", "the row has 1 columns, but column 2 was read as Int64"),
        ("SELECT 'a' AS name, 1 AS legs, 2 AS eyes", "column 3 (eyes) was not read"),
        ("SELECT 'a' AS name, 'b' AS legs", "column 2 (legs) is not an integer"),
        ("SELECT 'a' AS name, true AS legs", "column 2 (legs) is not an integer"),
    ])
    func `a row of another shape is an error that names the column and the statement`(
        statement: String, problem: String
    ) throws {
        var connection = try database.connect()
        #expect(throws: DatabaseError(.unexpectedRow, "\(problem), in the result of: \(statement)")) {
            try readPair(statement, on: &connection)
        }
        #expect(DatabaseError(.unexpectedRow, "").remedy == .fixSetup)
        #expect(try connection.query("SELECT 1").value(Int.self) == 1, "the connection still works")
    }

    @Test func `an array of integers is read completely, and is no array of texts`() throws {
        var connection = try database.connect()
        let numbers = "SELECT ARRAY[1, -2, 2147483647] AS a"
        #expect(try connection.query(numbers).value([Int32].self) == [1, -2, .max])
        #expect(try connection.query("SELECT '{}'::integer[]").value([Int32].self) == [])
        #expect(
            throws: DatabaseError(
                .unexpectedRow, "column 1 (a) is not a binary text[], in the result of: \(numbers)")
        ) {
            _ = try connection.query(numbers).value([String].self)
        }
    }

    @Test func `an array of texts is read completely, and must not contain null`() throws {
        var connection = try database.connect()
        #expect(try connection.query("SELECT ARRAY['a', '', 'ü']").value([String].self) == ["a", "", "ü"])
        #expect(try connection.query("SELECT '{}'::text[]").value([String].self) == [])
        #expect(try connection.query("SELECT NULL::text[]").value([String]?.self) == nil)
        #expect(
            throws: DatabaseError(
                .unexpectedRow, "column 1 (a) contains null, in the result of: SELECT ARRAY['a', NULL] AS a")
        ) {
            _ = try connection.query("SELECT ARRAY['a', NULL] AS a").value([String].self)
        }
    }

    @Test func `a value of another type or size is an error`() throws {
        var connection = try database.connect()
        #expect(throws: DatabaseError.self) { _ = try connection.query("SELECT 1").value(Bool.self) }
        #expect(throws: DatabaseError.self) { _ = try connection.query("SELECT 1::bigint << 40").value(Int32.self) }
        #expect(throws: DatabaseError.self) { _ = try connection.query("SELECT 1::bigint").value(Instant.self) }
        #expect(throws: DatabaseError.self) { _ = try connection.run("SELECT now()").value(Instant.self) }
    }
}

@Suite(.ownThread) struct `Errors of the database` {
    @Test func `a lost connection and an unreadable password file are told apart`() throws {
        let address = try DatabaseAddress("host=/nonexistent dbname=x")
        let lost = #expect(throws: DatabaseError.self) { _ = try Connection(to: address) }
        #expect(lost?.kind == .connection && lost?.sqlState == nil && lost?.remedy == .reconnect)
        let noFile = try DatabaseAddress("host=/nonexistent dbname=x", passwordFile: "/nonexistent/password")
        let unreadable = #expect(throws: DatabaseError.self) { _ = try Connection(to: noFile) }
        #expect(unreadable?.kind == .configuration && unreadable?.sqlState == nil && unreadable?.remedy == .reconnect)
        let text = #expect(throws: DatabaseError.self) { _ = try DatabaseAddress("host=x port=many") }
        #expect(text?.kind == .configuration)
    }
}
