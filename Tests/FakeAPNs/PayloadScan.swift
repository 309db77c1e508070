/// One pass over a payload: whether it is a JSON object, and what its `aps` contains. Without Foundation, because it runs for every
/// request.
struct PayloadScan {
    private(set) var hasAps = false
    private(set) var isContentAvailable = false
    /// Whether `aps` has an alert, a sound or a badge.
    private(set) var isVisible = false

    private let bytes: UnsafeRawBufferPointer
    private var position = 0

    /// Nil if the payload is not a JSON object.
    init?(_ bytes: UnsafeRawBufferPointer) {
        self.bytes = bytes
        skipBlanks()
        guard peek() == UInt8(ascii: "{"), value(.top, depth: 0) else { return nil }
        skipBlanks()
        guard position == bytes.count else { return nil }
    }

    private enum Place { case top, aps, elsewhere }

    private func peek() -> UInt8? { position < bytes.count ? bytes[position] : nil }

    private mutating func take(_ byte: UInt8) -> Bool {
        guard peek() == byte else { return false }
        position += 1
        return true
    }

    private mutating func skipBlanks() {
        while let byte = peek(), byte == 0x20 || byte == 0x0a || byte == 0x0d || byte == 0x09 { position += 1 }
    }

    private mutating func value(_ place: Place, depth: Int) -> Bool {
        guard depth < 64, let first = peek() else { return false }
        switch first {
        case UInt8(ascii: "{"): return object(place, depth: depth)
        case UInt8(ascii: "["): return array(depth: depth)
        case UInt8(ascii: "\""): return string() != nil
        case UInt8(ascii: "t"): return word("true")
        case UInt8(ascii: "f"): return word("false")
        case UInt8(ascii: "n"): return word("null")
        default: return number()
        }
    }

    private mutating func object(_ place: Place, depth: Int) -> Bool {
        position += 1
        skipBlanks()
        if take(UInt8(ascii: "}")) { return true }
        while true {
            skipBlanks()
            guard let key = string() else { return false }
            skipBlanks()
            guard take(UInt8(ascii: ":")) else { return false }
            skipBlanks()
            let start = position
            let isAps = place == .top && matches(key, "aps") && peek() == UInt8(ascii: "{")
            guard value(isAps ? .aps : .elsewhere, depth: depth + 1) else { return false }
            if isAps { hasAps = true }
            if place == .aps {
                if matches(key, "content-available") {
                    isContentAvailable = position - start == 1 && bytes[start] == UInt8(ascii: "1")
                } else if matches(key, "alert") || matches(key, "sound") || matches(key, "badge") {
                    isVisible = true
                }
            }
            skipBlanks()
            if take(UInt8(ascii: "}")) { return true }
            guard take(UInt8(ascii: ",")) else { return false }
        }
    }

    private mutating func array(depth: Int) -> Bool {
        position += 1
        skipBlanks()
        if take(UInt8(ascii: "]")) { return true }
        while true {
            skipBlanks()
            guard value(.elsewhere, depth: depth + 1) else { return false }
            skipBlanks()
            if take(UInt8(ascii: "]")) { return true }
            guard take(UInt8(ascii: ",")) else { return false }
        }
    }

    /// The bytes between the quotes.
    private mutating func string() -> Range<Int>? {
        guard take(UInt8(ascii: "\"")) else { return nil }
        let start = position
        while let byte = peek() {
            position += 1
            switch byte {
            case UInt8(ascii: "\""): return start..<(position - 1)
            case UInt8(ascii: "\\"):
                guard let escaped = peek() else { return nil }
                position += 1
                if escaped == UInt8(ascii: "u") {
                    guard position + 4 <= bytes.count, bytes[position..<position + 4].allSatisfy(Hex.isDigit) else {
                        return nil
                    }
                    position += 4
                } else if !"\"\\/bfnrt".utf8.contains(escaped) {
                    return nil
                }
            case 0..<0x20: return nil
            default: break
            }
        }
        return nil
    }

    private mutating func word(_ word: StaticString) -> Bool {
        let end = position + word.utf8CodeUnitCount
        guard end <= bytes.count, matches(position..<end, word) else { return false }
        position = end
        return true
    }

    private mutating func number() -> Bool {
        _ = take(UInt8(ascii: "-"))
        let start = position
        guard digits() else { return false }
        if bytes[start] == UInt8(ascii: "0"), position - start > 1 { return false }  // a leading zero
        if take(UInt8(ascii: ".")), !digits() { return false }
        if take(UInt8(ascii: "e")) || take(UInt8(ascii: "E")) {
            if !take(UInt8(ascii: "-")) { _ = take(UInt8(ascii: "+")) }
            return digits()
        }
        return true
    }

    /// One or more digits.
    private mutating func digits() -> Bool {
        let start = position
        while let byte = peek(), isDigit(byte) { position += 1 }
        return position > start
    }

    private func isDigit(_ byte: UInt8) -> Bool { UInt8(ascii: "0")...UInt8(ascii: "9") ~= byte }

    private func matches(_ range: Range<Int>, _ text: StaticString) -> Bool {
        guard range.count == text.utf8CodeUnitCount else { return false }
        for offset in 0..<range.count where bytes[range.lowerBound + offset] != text.utf8Start[offset] { return false }
        return true
    }
}

enum Hex {
    static func isDigit(_ byte: UInt8) -> Bool {
        switch byte {
        case UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "a")...UInt8(ascii: "f"),
            UInt8(ascii: "A")...UInt8(ascii: "F"):
            true
        default: false
        }
    }
}
