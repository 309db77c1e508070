extension UInt8 {
    static let newline = UInt8(ascii: "\n")
    static let carriageReturn = UInt8(ascii: "\r")
    static let quote = UInt8(ascii: "\"")
    static let backslash = UInt8(ascii: "\\")

    /// White space of a line of text, JSON or XML.
    var isBlank: Bool { self == 0x20 || self == 0x09 || self == 0x0A || self == 0x0D }

    /// The value of a hex digit; nil for any other byte.
    var hexValue: UInt8? {
        switch self {
        case UInt8(ascii: "0")...UInt8(ascii: "9"): self - UInt8(ascii: "0")
        case UInt8(ascii: "a")...UInt8(ascii: "f"): self - UInt8(ascii: "a") + 10
        case UInt8(ascii: "A")...UInt8(ascii: "F"): self - UInt8(ascii: "A") + 10
        default: nil
        }
    }
}

/// Searching in bytes.
enum Bytes {
    /// What some programs write at the beginning of a file in UTF-8.
    static let byteOrderMark: [UInt8] = [0xEF, 0xBB, 0xBF]

    /// Whether the text is at this place.
    static func has(_ text: [UInt8], in bytes: [UInt8], at place: Int, to end: Int) -> Bool {
        guard place + text.count <= end else { return false }
        var index = 0
        while index < text.count {
            if bytes[place + index] != text[index] { return false }
            index += 1
        }
        return true
    }

    /// The first place of a byte; nil if there is none.
    static func first(_ byte: UInt8, in bytes: [UInt8], from start: Int, to end: Int) -> Int? {
        var place = start
        while place < end {
            if bytes[place] == byte { return place }
            place += 1
        }
        return nil
    }

    /// The first place of a text; nil if there is none.
    static func first(_ text: [UInt8], in bytes: [UInt8], from start: Int, to end: Int) -> Int? {
        var place = start
        while let found = first(text[0], in: bytes, from: place, to: end) {
            if has(text, in: bytes, at: found, to: end) { return found }
            place = found + 1
        }
        return nil
    }

    /// The range without white space at its ends.
    static func trimmed(_ bytes: [UInt8], _ range: Range<Int>) -> Range<Int> {
        var (start, end) = (range.lowerBound, range.upperBound)
        while start < end, bytes[start].isBlank { start += 1 }
        while start < end, bytes[end - 1].isBlank { end -= 1 }
        return start..<end
    }

    /// How many lines end in this range.
    static func newlines(in bytes: [UInt8], from start: Int, to end: Int) -> Int {
        var count = 0
        var place = start
        while place < end {
            if bytes[place] == .newline { count += 1 }
            place += 1
        }
        return count
    }
}
