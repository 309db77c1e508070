/// A hash for telling files and options apart, not for secrets (FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv).
struct Fingerprint {
    private var value: UInt64 = 0xCBF2_9CE4_8422_2325

    mutating func add(_ bytes: some Sequence<UInt8>) {
        for byte in bytes { value = (value ^ UInt64(byte)) &* 0x100_0000_01B3 }
        // So that ("a", "bc") and ("ab", "c") differ.
        value = (value ^ 0xFF) &* 0x100_0000_01B3
    }

    var text: String { String(value, radix: 16) }
}
