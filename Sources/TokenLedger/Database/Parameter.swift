package import TokenModel

/// A value on its way to the server, in PostgreSQL's binary format.
package enum Parameter {
    case text(String?)
    case bool(Bool)
    case int4(Int32)
    case int8(Int64?)
    case instant(Instant?)
    case bools([Bool])
    case int4s([Int32?])
    case int8s([Int64])
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

    /// The value's bytes, or nil for null.
    var encoded: [UInt8]? {
        switch self {
        case .text(let value): value.map { Array($0.utf8) }
        case .bool(let value): [value ? 1 : 0]
        case .int4(let value): Self.bigEndian(value)
        case .int8(let value): value.map { Self.bigEndian($0) }
        case .instant(let value): value.map { Self.bigEndian($0.sinceServerEpoch) }
        case .bools(let values):
            Self.array(of: 16, values) { value, bytes in bytes.append(value ? 1 : 0) }
        case .int4s(let values):
            Self.array(of: 23, values) { value, bytes in Self.append(value, to: &bytes) }
        case .int8s(let values):
            Self.array(of: 20, values) { value, bytes in Self.append(value, to: &bytes) }
        case .texts(let values):
            Self.array(of: 25, values) { value, bytes in bytes.append(contentsOf: value.utf8) }
        case .byteas(let values):
            Self.array(of: 17, values) { value, bytes in bytes.append(contentsOf: value) }
        case .instants(let values):
            Self.array(of: 1184, values) { value, bytes in Self.append(value.sinceServerEpoch, to: &bytes) }
        }
    }

    /// An array of one dimension, as `array_recv` reads it: dimensions, has-nulls, element type, length, lower bound;
    /// then each element with its length, -1 for null.
    private static func array<Value>(
        of elementType: UInt32, _ values: [Value?], append: (Value, inout [UInt8]) -> Void
    ) -> [UInt8] {
        var bytes: [UInt8] = []
        bytes.reserveCapacity(20 + values.count * 16)
        Self.append(Int32(values.isEmpty ? 0 : 1), to: &bytes)
        Self.append(Int32(1), to: &bytes)
        Self.append(elementType, to: &bytes)
        if values.isEmpty { return bytes }
        Self.append(Int32(values.count), to: &bytes)
        Self.append(Int32(1), to: &bytes)
        for value in values {
            let lengthAt = bytes.count
            Self.append(Int32(-1), to: &bytes)
            guard let value else { continue }
            append(value, &bytes)
            let length = bigEndian(Int32(bytes.count - lengthAt - 4))
            bytes.replaceSubrange(lengthAt..<lengthAt + 4, with: length)
        }
        return bytes
    }

    private static func append<Value: FixedWidthInteger>(_ value: Value, to bytes: inout [UInt8]) {
        for shift in stride(from: Value.bitWidth - 8, through: 0, by: -8) {
            bytes.append(UInt8(truncatingIfNeeded: value >> Value(shift)))
        }
    }

    private static func bigEndian<Value: FixedWidthInteger>(_ value: Value) -> [UInt8] {
        var bytes: [UInt8] = []
        append(value, to: &bytes)
        return bytes
    }
}

extension Instant {
    /// Microseconds between 1970-01-01 and 2000-01-01, from which PostgreSQL counts.
    private static let serverEpoch: Int64 = 946_684_800_000_000

    /// As PostgreSQL sends and takes it; the infinities are the ends of the range on both sides.
    var sinceServerEpoch: Int64 {
        isFinite ? advanced(byMicroseconds: -Self.serverEpoch).microseconds : microseconds
    }

    init(sinceServerEpoch value: Int64) {
        let plain = Instant(microseconds: value)
        self = plain.isFinite ? plain.advanced(byMicroseconds: Self.serverEpoch) : plain
    }
}
