internal import CLibPQ

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

    /// Decodes one row. For rows that are read in another order, or more than once.
    ///
    /// - Parameter index: 0 up to, but not including, `count`.
    package func at<Value>(
        _ index: Int, _ read: (inout Row) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value {
        var row = unsafe Row(index, of: result, statement: statement)
        let value = try read(&row)
        try row.advance()
        return value
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
        return try at(0, read)
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
