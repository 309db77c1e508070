/// UUIDs in lower case, for requests without one. They are different but not random: random bytes would cost a system call each.
struct IdentifierMaker {
    private var state = UInt64.random(in: .min ... .max)

    mutating func next() -> String {
        let high = random()
        let low = random()
        // Version 4, variant 1.
        let words = (high & ~0xf000 | 0x4000, low & ~(3 << 62) | (2 << 62))
        return String(unsafeUninitializedCapacity: 36) { text in
            var position = 0
            for word in [words.0, words.1] {
                for shift in stride(from: 60, through: 0, by: -4) {
                    if position == 8 || position == 13 || position == 18 || position == 23 {
                        text[position] = UInt8(ascii: "-")
                        position += 1
                    }
                    let digit = UInt8(truncatingIfNeeded: word >> UInt64(shift)) & 15
                    text[position] = digit < 10 ? digit + 48 : digit + 87
                    position += 1
                }
            }
            return position
        }
    }

    /// splitmix64
    private mutating func random() -> UInt64 {
        state &+= 0x9E37_79B9_7F4A_7C15
        var z = state
        z = (z ^ (z >> 30)) &* 0xBF58_476D_1CE4_E5B9
        z = (z ^ (z >> 27)) &* 0x94D0_49BB_1331_11EB
        return z ^ (z >> 31)
    }
}
