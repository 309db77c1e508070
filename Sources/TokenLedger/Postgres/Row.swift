internal import CLibPQ
package import TokenModel

/// One row, read column by column from left to right.
///
/// If a row does not have the columns that the code reads, that is a programming error. It throws an error with the column's name
/// and the statement, and never returns a default.
@safe package struct Row: ~Copyable {
    private let result: OpaquePointer
    private let statement: String
    private let columns: Int32
    private var row: Int32
    private var column: Int32 = 0

    init(_ row: Int, of result: OpaquePointer, statement: String) {
        unsafe self.result = result
        self.statement = statement
        unsafe self.columns = PQnfields(result)
        self.row = Int32(row)
    }

    /// Reads the next column. An optional type accepts null; any other type does not.
    package mutating func read<Value: ColumnDecodable>(
        _ type: Value.Type = Value.self
    ) throws(DatabaseError) -> Value {
        guard column < columns else {
            throw unexpected("the row has \(columns) columns, but column \(column + 1) was read as \(type)")
        }
        let value = try Value(column: self)
        column += 1
        return value
    }

    /// Goes on to the next row. Every column of this one must have been read.
    mutating func advance() throws(DatabaseError) {
        guard column == columns else { throw mismatch("was not read") }
        row += 1
        column = 0
    }

    // What a `ColumnDecodable` sees of the current column.

    package var isNull: Bool { unsafe PQgetisnull(result, row, column) == 1 }

    /// Whether the value is in PostgreSQL's binary format, as `query` returns it. `run` returns text.
    var isBinary: Bool { unsafe PQfformat(result, column) == 1 }

    /// Whether it is an int8, int2 or int4.
    var isInteger: Bool { type == 20 || type == 21 || type == 23 }

    /// The type's OID in pg_type.dat.
    var type: UInt32 { unsafe PQftype(result, column) }

    /// The bytes of the value.
    func bytes<Value>(_ read: (UnsafeRawBufferPointer) -> Value) throws(DatabaseError) -> Value {
        guard !isNull, let start = unsafe PQgetvalue(result, row, column) else { throw mismatch("is null") }
        return unsafe read(UnsafeRawBufferPointer(start: start, count: Int(PQgetlength(result, row, column))))
    }

    /// An error about the current column.
    ///
    /// - Parameter problem: What is wrong, as in `is null`.
    package func mismatch(_ problem: String) -> DatabaseError {
        let name = unsafe PQfname(result, column).map { unsafe String(cString: $0) } ?? ""
        return unexpected("column \(column + 1) (\(name)) \(problem)")
    }

    private func unexpected(_ problem: String) -> DatabaseError {
        let words = statement.split(whereSeparator: \.isWhitespace).joined(separator: " ")
        return DatabaseError(.unexpectedRow, "\(problem), in the result of: \(words.prefix(200))")
    }
}

/// A value that one column of a row decodes to.
package protocol ColumnDecodable {
    init(column: borrowing Row) throws(DatabaseError)
}

extension Optional: ColumnDecodable where Wrapped: ColumnDecodable {
    package init(column: borrowing Row) throws(DatabaseError) {
        self = column.isNull ? nil : try Wrapped(column: column)
    }
}

extension String: ColumnDecodable {
    /// Bytes that are not UTF-8 (an SQL_ASCII database) are repaired.
    package init(column: borrowing Row) throws(DatabaseError) {
        self = try unsafe column.bytes { unsafe String(decoding: $0, as: UTF8.self) }
    }
}

extension Int64: ColumnDecodable {
    /// A `bigint`, `integer` or `smallint`, in either format.
    package init(column: borrowing Row) throws(DatabaseError) {
        guard column.isInteger else { throw column.mismatch("is not an integer") }
        if column.isBinary {
            self = try unsafe column.bytes { bytes in
                guard let first = unsafe bytes.first else { return 0 }
                return unsafe bytes.reduce(first & 0x80 == 0 ? 0 : -1) { $0 << 8 | Int64($1) }
            }
            return
        }
        guard let value = Int64(try String(column: column)) else { throw column.mismatch("is not an integer") }
        self = value
    }
}

extension Int32: ColumnDecodable {
    package init(column: borrowing Row) throws(DatabaseError) {
        guard let value = Int32(exactly: try Int64(column: column)) else {
            throw column.mismatch("does not fit into 32 bits")
        }
        self = value
    }
}

extension Int: ColumnDecodable {
    package init(column: borrowing Row) throws(DatabaseError) { self.init(try Int64(column: column)) }
}

extension Double: ColumnDecodable {
    /// A `double precision` in binary.
    package init(column: borrowing Row) throws(DatabaseError) {
        guard column.type == 701, column.isBinary else { throw column.mismatch("is not a binary double precision") }
        self.init(bitPattern: try unsafe column.bytes { unsafe $0.reduce(0) { $0 << 8 | UInt64($1) } })
    }
}

extension Bool: ColumnDecodable {
    package init(column: borrowing Row) throws(DatabaseError) {
        guard column.type == 16 else { throw column.mismatch("is not a boolean") }
        // 1 in binary, t in text.
        self = try unsafe column.bytes { unsafe $0.first == 1 || $0.first == UInt8(ascii: "t") }
    }
}

extension Instant: ColumnDecodable {
    /// A `timestamptz` in binary.
    package init(column: borrowing Row) throws(DatabaseError) {
        guard column.type == 1184, column.isBinary else { throw column.mismatch("is not a binary timestamptz") }
        self.init(
            sinceServerEpoch: try unsafe column.bytes { unsafe $0.reduce(0) { $0 << 8 | Int64($1) } })
    }
}

/// A value that an array in a column consists of.
package protocol ArrayElement {
    /// The array's OID in pg_type.dat, and its name.
    static var arrayType: (oid: UInt32, name: String) { get }

    /// - Parameter element: The element in PostgreSQL's binary format.
    init(element: UnsafeRawBufferPointer)
}

extension String: ArrayElement {
    package static let arrayType = (oid: UInt32(1009), name: "text[]")

    package init(element: UnsafeRawBufferPointer) { unsafe self.init(decoding: element, as: UTF8.self) }
}

extension Int32: ArrayElement {
    package static let arrayType = (oid: UInt32(1007), name: "integer[]")

    package init(element: UnsafeRawBufferPointer) {
        unsafe self.init(bigEndian: element.loadUnaligned(as: Int32.self))
    }
}

extension Bool: ArrayElement {
    package static let arrayType = (oid: UInt32(1000), name: "boolean[]")

    package init(element: UnsafeRawBufferPointer) { self = unsafe element.first == 1 }
}

extension Array: ColumnDecodable where Element: ArrayElement {
    /// An array of one dimension without nulls, in binary. `Parameter` describes the format.
    package init(column: borrowing Row) throws(DatabaseError) {
        guard column.type == Element.arrayType.oid, column.isBinary else {
            throw column.mismatch("is not a binary \(Element.arrayType.name)")
        }
        let values = try unsafe column.bytes { bytes -> [Element]? in
            func int32(at offset: Int) -> Int {
                unsafe Int(Int32(bigEndian: bytes.loadUnaligned(fromByteOffset: offset, as: Int32.self)))
            }
            // No dimension: empty.
            if int32(at: 0) == 0 { return [] }
            var (values, offset) = ([Element](), 20)
            for _ in 0..<int32(at: 12) {
                let length = int32(at: offset)
                if length < 0 { return nil }
                unsafe values.append(
                    Element(element: UnsafeRawBufferPointer(rebasing: bytes[(offset + 4)..<(offset + 4 + length)])))
                offset += 4 + length
            }
            return values
        }
        guard let values else { throw column.mismatch("contains null") }
        self = values
    }
}

/// A fixed set of words: any other word is an error.
extension ColumnDecodable where Self: RawRepresentable<String> {
    package init(column: borrowing Row) throws(DatabaseError) {
        let word = try String(column: column)
        guard let value = Self(rawValue: word) else { throw column.mismatch("has the unknown value \"\(word)\"") }
        self = value
    }
}
