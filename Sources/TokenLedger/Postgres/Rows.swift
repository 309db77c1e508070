internal import CLibPQ
package import TokenModel

/// The rows that a statement returned. Owns the `PGresult`; no pointer to it leaves this file and Row.swift.
@safe package struct Rows: ~Copyable {
    private let result: OpaquePointer
    /// Named in errors about a row.
    private let statement: String

    /// Takes ownership of a result.
    init(owning result: OpaquePointer, of statement: String) {
        unsafe self.result = result
        self.statement = statement
    }

    deinit {
        unsafe PQclear(result)
    }

    package var count: Int { unsafe Int(PQntuples(result)) }

    /// The command tag, such as `COMMIT` or `DELETE 5`.
    package var commandTag: String { unsafe String(cString: PQcmdStatus(result)) }

    /// How many rows an INSERT, UPDATE or DELETE without RETURNING touched.
    package var affected: Int { unsafe Int(String(cString: PQcmdTuples(result))) ?? 0 }
}

extension Rows {
    /// Decodes every row. `read` reads all columns of a row, in order.
    package func decode<Value>(
        _ read: (inout Row) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> [Value] {
        var values: [Value] = []
        values.reserveCapacity(count)
        var row = unsafe Row(0, of: result, statement: statement)
        for _ in 0..<count {
            values.append(try read(&row))
            try row.advance()
        }
        return values
    }

    /// Decodes the only row; nil if there is none.
    package func first<Value>(
        _ read: (inout Row) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value? {
        if count == 0 { return nil }
        return try one(read)
    }

    /// Decodes the only row, which must be there.
    package func one<Value>(
        _ read: (inout Row) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value {
        guard count == 1 else {
            throw DatabaseError(
                .unexpectedRow, "\(count) rows were returned instead of one by: \(statement.prefix(200))")
        }
        var row = unsafe Row(0, of: result, statement: statement)
        let value = try read(&row)
        try row.advance()
        return value
    }

    /// Decodes the only column of every row.
    package func values<Value: ColumnDecodable>(_ type: Value.Type = Value.self) throws(DatabaseError) -> [Value] {
        try decode { row throws(DatabaseError) in try row.read(type) }
    }

    /// Decodes the only column of the only row.
    package func value<Value: ColumnDecodable>(_ type: Value.Type = Value.self) throws(DatabaseError) -> Value {
        try one { row throws(DatabaseError) in try row.read(type) }
    }
}

// Access by column number, until every folder decodes in order.
extension Rows {
    package func isNull(_ row: Int, _ column: Int) -> Bool {
        unsafe PQgetisnull(result, Int32(row), Int32(column)) == 1
    }

    /// A text, of either format; nil for null. Bytes that are not UTF-8 (an SQL_ASCII database) are repaired.
    package func text(_ row: Int, _ column: Int) -> String? {
        unsafe value(row, column) { unsafe String(decoding: $0, as: UTF8.self) }
    }

    /// A `smallint`, `integer` or `bigint` of a binary result; nil for null.
    package func integer(_ row: Int, _ column: Int) -> Int64? {
        unsafe value(row, column) { bytes in
            guard let first = unsafe bytes.first else { return 0 }
            return unsafe bytes.reduce(first & 0x80 == 0 ? 0 : -1) { $0 << 8 | Int64($1) }
        }
    }

    private func value<Value>(_ row: Int, _ column: Int, _ read: (UnsafeRawBufferPointer) -> Value) -> Value? {
        guard !isNull(row, column), let start = unsafe PQgetvalue(result, Int32(row), Int32(column)) else { return nil }
        let length = unsafe Int(PQgetlength(result, Int32(row), Int32(column)))
        return unsafe read(UnsafeRawBufferPointer(start: start, count: length))
    }

    /// A `boolean` of a binary result; nil for null.
    package func bool(_ row: Int, _ column: Int) -> Bool? {
        unsafe value(row, column) { unsafe $0.first == 1 }
    }

    /// A `timestamptz` of a binary result; nil for null.
    package func instant(_ row: Int, _ column: Int) -> Instant? {
        integer(row, column).map(Instant.init(sinceServerEpoch:))
    }
}
