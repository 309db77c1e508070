extension DeviceToken {
    /// Reads a token in each form that `tokenkeeper.parse_token` reads: hex in either case, with blanks, in `<…>`, after `0x` or `\x`, or
    /// with dashes or colons between the bytes. The database decides; a test compares the two.
    ///
    /// - Returns: Nil for anything else, or unless it is 1 to 512 bytes.
    public init?(spelled text: String) {
        self.init(spelled: text.utf8.span)
    }

    /// - Parameter text: UTF-8.
    public init?(spelled text: Span<UInt8>) {
        if let plain = DeviceToken(hex: text) {
            self = plain
            return
        }
        guard text.count <= Self.longestSpelling else { return nil }
        let blank = UInt8(ascii: " ")
        var rest = Self.withPlainBlanks(text)[...].trimmed(of: blank)
        if rest.count >= 2, rest.first == UInt8(ascii: "<"), rest.last == UInt8(ascii: ">") {
            rest = rest.dropFirst().dropLast().trimmed(of: blank)
        }
        if [Array("0x".utf8), Array("0X".utf8), Array("\\x".utf8)].contains(Array(rest.prefix(2))) {
            rest = rest.dropFirst(2)
        }
        let separator = rest.dropFirst(2).first ?? blank
        let digits =
            separator == UInt8(ascii: "-") || separator == UInt8(ascii: ":")
            ? Self.bytewise(rest, separator) : rest.filter { $0 != blank }
        self.init(hex: digits.span)
    }

    /// As in `parse_decorated_token`: 512 bytes as `ab cd …`, with some room.
    private static let longestSpelling = 4096

    /// Each tab, line break, no-break space and byte order mark as a space.
    private static func withPlainBlanks(_ text: Span<UInt8>) -> [UInt8] {
        var bytes: [UInt8] = []
        bytes.reserveCapacity(text.count)
        for place in text.indices {
            bytes.append(text[place])
            switch text[place] {
            case 9, 10, 13: bytes[bytes.count - 1] = UInt8(ascii: " ")
            case 0xA0 where bytes.suffix(2) == [0xC2, 0xA0]: bytes.replaceSubrange((bytes.count - 2)..., with: " ".utf8)
            case 0xBF where bytes.suffix(3) == [0xEF, 0xBB, 0xBF]:
                bytes.replaceSubrange((bytes.count - 3)..., with: " ".utf8)
            default: break
            }
        }
        return bytes
    }

    /// The digits of `AB-CD-EF`; nothing unless the separator is after each byte but the last. Other groups are something else: a UUID, for
    /// example.
    private static func bytewise(_ text: ArraySlice<UInt8>, _ separator: UInt8) -> [UInt8] {
        guard text.count % 3 == 2 else { return [] }
        var digits: [UInt8] = []
        for (place, byte) in text.enumerated() {
            if place % 3 < 2 {
                digits.append(byte)
            } else if byte != separator {
                return []
            }
        }
        return digits
    }
}

extension ArraySlice<UInt8> {
    fileprivate func trimmed(of byte: UInt8) -> ArraySlice {
        guard let first = firstIndex(where: { $0 != byte }), let last = lastIndex(where: { $0 != byte }) else {
            return []
        }
        return self[first...last]
    }
}
