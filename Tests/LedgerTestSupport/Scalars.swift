import TokenLedger

extension Connection {
    /// The only column of the first row, as text.
    public mutating func scalar(_ sql: String) throws -> String? {
        let rows = try run(sql)
        return rows.count == 0 ? nil : try rows.at(0) { row throws(DatabaseError) in try row.read(String?.self) }
    }

    /// All rows as text: columns joined by `|`, null as an empty text.
    public mutating func lines(_ sql: String, columns: Int) throws -> [String] {
        let rows = try run(sql)
        return try rows.decode { row throws(DatabaseError) in
            var values: [String] = []
            for _ in 0..<columns { values.append(try row.read(String?.self) ?? "") }
            return values.joined(separator: "|")
        }
    }

    public mutating func execute(_ sql: String) throws {
        try run(sql)
    }
}

/// Repeatable random numbers: splitmix64. The tests that use it print the seed.
public struct SeededChance: RandomNumberGenerator, Sendable {
    private var state: UInt64

    public init(seed: UInt64) {
        state = seed
    }

    public mutating func next() -> UInt64 {
        state &+= 0x9E37_79B9_7F4A_7C15
        var z = state
        z = (z ^ (z >> 30)) &* 0xBF58_476D_1CE4_E5B9
        z = (z ^ (z >> 27)) &* 0x94D0_49BB_1331_11EB
        return z ^ (z >> 31)
    }

    /// A number from 0 to `sides` - 1.
    public mutating func dice(_ sides: Int) -> Int { Int.random(in: 0..<sides, using: &self) }
}
