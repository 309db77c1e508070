package import TokenModel

/// A parameter of a statement, in PostgreSQL's binary format.
package enum Parameter {
    case text(String?)
    case bool(Bool)
    case int4(Int32)
    case int8(Int64?)
    case instant(Instant?)
    case bools([Bool])
    case int4s([Int32?])
    case int8s([Int64?])
    case texts([String?])
    case byteas([[UInt8]])
    case instants([Instant?])

    /// The type's OID in pg_type.dat, which is the same in every PostgreSQL.
    var type: UInt32 {
        switch self {
        case .text: 25
        case .bool: 16
        case .int4: 23
        case .int8: 20
        case .instant: 1184
        case .bools: 1000
        case .int4s: 1007
        case .int8s: 1016
        case .texts: 1009
        case .byteas: 1001
        case .instants: 1185
        }
    }

    /// Appends the value's bytes.
    ///
    /// - Returns: How many; nil for null.
    func encode(into bytes: inout [UInt8]) -> Int? {
        let start = bytes.count
        switch self {
        case .text(nil), .int8(nil), .instant(nil): return nil
        case .text(let value?): bytes.append(contentsOf: value.utf8)
        case .bool(let value): bytes.append(value ? 1 : 0)
        case .int4(let value): Self.append(value, to: &bytes)
        case .int8(let value?): Self.append(value, to: &bytes)
        case .instant(let value?): Self.append(value.sinceServerEpoch, to: &bytes)
        case .bools(let values):
            Self.array(of: 16, values, into: &bytes) { value, bytes in bytes.append(value ? 1 : 0) }
        case .int4s(let values):
            Self.array(of: 23, values, into: &bytes) { value, bytes in Self.append(value, to: &bytes) }
        case .int8s(let values):
            Self.array(of: 20, values, into: &bytes) { value, bytes in Self.append(value, to: &bytes) }
        case .texts(let values):
            Self.array(of: 25, values, into: &bytes) { value, bytes in bytes.append(contentsOf: value.utf8) }
        case .byteas(let values):
            Self.array(of: 17, values, into: &bytes) { value, bytes in bytes.append(contentsOf: value) }
        case .instants(let values):
            Self.array(of: 1184, values, into: &bytes) { value, bytes in
                Self.append(value.sinceServerEpoch, to: &bytes)
            }
        }
        return bytes.count - start
    }

    /// An array of one dimension, as `array_recv` reads it: number of dimensions, has-nulls, element type, length, lower bound; then
    /// each element with its length, -1 for null.
    private static func array<Value>(
        of elementType: UInt32, _ values: [Value?], into bytes: inout [UInt8], append: (Value, inout [UInt8]) -> Void
    ) {
        Self.append(Int32(values.isEmpty ? 0 : 1), to: &bytes)
        Self.append(Int32(1), to: &bytes)
        Self.append(elementType, to: &bytes)
        if values.isEmpty { return }
        Self.append(Int32(values.count), to: &bytes)
        Self.append(Int32(1), to: &bytes)
        for value in values {
            let lengthAt = bytes.count
            Self.append(Int32(-1), to: &bytes)
            guard let value else { continue }
            append(value, &bytes)
            let length = Int32(bytes.count - lengthAt - 4)
            for byte in 0..<4 { bytes[lengthAt + byte] = UInt8(truncatingIfNeeded: length >> (24 - 8 * Int32(byte))) }
        }
    }

    private static func append<Value: FixedWidthInteger>(_ value: Value, to bytes: inout [UInt8]) {
        for shift in stride(from: Value.bitWidth - 8, through: 0, by: -8) {
            bytes.append(UInt8(truncatingIfNeeded: value >> Value(shift)))
        }
    }
}

extension Instant {
    /// Microseconds between 1970-01-01 and 2000-01-01, from which PostgreSQL counts.
    private static let serverEpoch: Int64 = 946_684_800_000_000

    /// As PostgreSQL sends and receives it. The infinities are the ends of the range on both sides.
    var sinceServerEpoch: Int64 {
        isFinite ? advanced(byMicroseconds: -Self.serverEpoch).microseconds : microseconds
    }

    init(sinceServerEpoch value: Int64) {
        let plain = Instant(microseconds: value)
        self = plain.isFinite ? plain.advanced(byMicroseconds: Self.serverEpoch) : plain
    }
}
