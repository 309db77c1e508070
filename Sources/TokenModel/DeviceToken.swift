/// A device token: the bytes that APNs gave to one app on one device, 1 to 512 of them.
///
/// Apple does not promise a length: 32 bytes are usual, and tokens of Live Activities are longer.
public struct DeviceToken: Hashable, Sendable {
    /// The token's bytes: the key of the ledger.
    public let bytes: [UInt8]

    /// The longest token that is accepted, in bytes.
    public static let maximumLength = 512

    /// Reads a token from hex, in upper or lower case: case makes no difference.
    ///
    /// - Returns: Nil unless the text is 1 to 512 whole bytes of hex and nothing else: no white space, no `0x`.
    public init?(hex: String) {
        self.init(hex: hex.utf8.span)
    }

    init?(hex digits: Span<UInt8>) {
        guard !digits.isEmpty, digits.count <= 2 * Self.maximumLength, digits.count.isMultiple(of: 2) else {
            return nil
        }
        var bytes: [UInt8] = []
        bytes.reserveCapacity(digits.count / 2)
        var place = 0
        while place < digits.count {
            guard let high = Self.value(ofHexDigit: digits[place]), let low = Self.value(ofHexDigit: digits[place + 1])
            else {
                return nil
            }
            bytes.append(high << 4 | low)
            place += 2
        }
        self.bytes = bytes
    }

    /// - Returns: Nil unless there are 1 to 512 bytes.
    public init?(bytes: [UInt8]) {
        guard 1...Self.maximumLength ~= bytes.count else { return nil }
        self.bytes = bytes
    }

    private static func value(ofHexDigit digit: UInt8) -> UInt8? {
        switch digit {
        case UInt8(ascii: "0")...UInt8(ascii: "9"): digit - UInt8(ascii: "0")
        case UInt8(ascii: "a")...UInt8(ascii: "f"): digit - UInt8(ascii: "a") + 10
        case UInt8(ascii: "A")...UInt8(ascii: "F"): digit - UInt8(ascii: "A") + 10
        default: nil
        }
    }
}

extension DeviceToken {
    /// All bytes at once: the library's own hash of an array takes one after the other.
    public func hash(into hasher: inout Hasher) {
        unsafe bytes.withUnsafeBytes { unsafe hasher.combine(bytes: $0) }
    }
}

extension DeviceToken: Comparable {
    /// Byte order, as PostgreSQL orders `bytea`. Batches lock rows in this order.
    public static func < (left: DeviceToken, right: DeviceToken) -> Bool {
        precedes(left.bytes.span, right.bytes.span)
    }
}

extension DeviceToken: CustomStringConvertible {
    /// The first four bytes and an ellipsis: enough to find the token, too little to send to it. Logs never hold a whole token.
    public var description: String {
        Self.hex(bytes.prefix(4)) + "…"
    }

    /// The whole token in lower-case hex, as the database writes it.
    public var hex: String { Self.hex(bytes[...]) }

    private static func hex(_ bytes: ArraySlice<UInt8>) -> String {
        let digits = Array("0123456789abcdef")
        return bytes.reduce(into: "") { text, byte in
            text.append(digits[Int(byte >> 4)])
            text.append(digits[Int(byte & 15)])
        }
    }
}

extension DeviceToken {
    /// A text in which everything that may be a device token is cut to its first eight digits and an ellipsis: each run of more than
    /// twenty hex digits. A date, a number or a UUID has no such run.
    public static func cut(in text: String) -> String {
        var cut = String.UnicodeScalarView()
        var digits = 0
        for scalar in text.unicodeScalars {
            digits = scalar.properties.isASCIIHexDigit ? digits + 1 : 0
            if digits == 21 {
                cut.removeLast(12)
                cut.append("…")
            }
            if digits <= 20 { cut.append(scalar) }
        }
        return String(cut)
    }
}

/// Byte order, as `bytea` and text in the "C" collation have it. The standard library compares through two iterators, which is too
/// slow for a comparison that runs a dozen times per token.
func precedes(_ left: Span<UInt8>, _ right: Span<UInt8>) -> Bool {
    var place = 0
    while place < left.count, place < right.count {
        if left[place] != right[place] { return left[place] < right[place] }
        place += 1
    }
    return left.count < right.count
}

/// Equality byte by byte. Swift's `==` on text also equates different bytes that mean the same characters.
func isSame(_ left: Span<UInt8>, _ right: Span<UInt8>) -> Bool {
    guard left.count == right.count else { return false }
    var place = 0
    while place < left.count, left[place] == right[place] { place += 1 }
    return place == left.count
}
