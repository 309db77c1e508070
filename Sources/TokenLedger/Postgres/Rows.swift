internal import CLibPQ
package import TokenModel

/// The rows that a statement answered. Owns the `PGresult`; no pointer of it leaves.
@safe package struct Rows: ~Copyable {
    private let result: OpaquePointer

    /// Takes ownership of a result.
    init(owning result: OpaquePointer) {
        unsafe self.result = result
    }

    deinit {
        unsafe PQclear(result)
    }

    package var count: Int { unsafe Int(PQntuples(result)) }

    /// The command tag, such as `COMMIT` or `DELETE 5`.
    package var commandTag: String { unsafe String(cString: PQcmdStatus(result)) }

    /// How many rows an INSERT, UPDATE or DELETE without RETURNING touched.
    package var affected: Int { unsafe Int(String(cString: PQcmdTuples(result))) ?? 0 }

    package func isNull(_ row: Int, _ column: Int) -> Bool {
        unsafe PQgetisnull(result, Int32(row), Int32(column)) == 1
    }

    /// A text, of either format; nil for null. Bytes that are no UTF-8 (an SQL_ASCII database) are repaired.
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
