/// Tags in one cell: `a,b`, PostgreSQL's `{a,"b c"}`, or JSON's `["a","b"]`. Pure.
struct TagText {
    var separator = UInt8(ascii: ",")

    /// - Parameter bytes: Contains the text. What had to be unescaped is appended.
    /// - Returns: Where each tag is in `bytes`, without nulls; nil if an array is malformed.
    func tags(_ bytes: inout [UInt8], _ range: Range<Int>) -> [Range<Int>]? {
        let (first, last) = (bytes[range.lowerBound], bytes[range.upperBound - 1])
        if range.count >= 2, first == UInt8(ascii: "{"), last == UInt8(ascii: "}") {
            return array(&bytes, (range.lowerBound + 1)..<(range.upperBound - 1))
        }
        if range.count >= 2, first == UInt8(ascii: "["), last == UInt8(ascii: "]") {
            return array(&bytes, (range.lowerBound + 1)..<(range.upperBound - 1))
        }
        var tags: [Range<Int>] = []
        var start = range.lowerBound
        for place in range.lowerBound...range.upperBound
        where place == range.upperBound || bytes[place] == separator {
            let tag = Bytes.trimmed(bytes, start..<place)
            // `a,,b` and a separator at the end are no mistakes worth a refusal.
            if !tag.isEmpty { tags.append(tag) }
            start = place + 1
        }
        return tags
    }

    /// The elements of an array, in quotes or not. In quotes, a backslash escapes the next character, as in PostgreSQL; JSON's escapes
    /// for control characters are refused.
    private func array(_ bytes: inout [UInt8], _ range: Range<Int>) -> [Range<Int>]? {
        if Bytes.trimmed(bytes, range).isEmpty { return [] }
        var tags: [Range<Int>] = []
        var place = range.lowerBound
        while true {
            while place < range.upperBound, bytes[place].isBlank { place += 1 }
            let begin = bytes.count
            if place < range.upperBound, bytes[place] == .quote {
                place += 1
                while place < range.upperBound, bytes[place] != .quote {
                    if bytes[place] == .backslash {
                        place += 1
                        guard place < range.upperBound else { return nil }
                        let isPlain =
                            bytes[place] == .quote || bytes[place] == .backslash || bytes[place] == UInt8(ascii: "/")
                        guard isPlain else { return nil }
                    }
                    bytes.append(bytes[place])
                    place += 1
                }
                guard place < range.upperBound else { return nil }
                place += 1
                tags.append(begin..<bytes.count)
            } else {
                let start = place
                while place < range.upperBound, bytes[place] != UInt8(ascii: ",") {
                    if bytes[place] == .quote || bytes[place] == UInt8(ascii: "{") { return nil }
                    place += 1
                }
                let tag = Bytes.trimmed(bytes, start..<place)
                let word = String(decoding: bytes[tag], as: UTF8.self)
                if word.isEmpty { return nil }
                if word.uppercased() != "NULL" { tags.append(tag) }
            }
            while place < range.upperBound, bytes[place].isBlank { place += 1 }
            if place == range.upperBound { return tags }
            guard bytes[place] == UInt8(ascii: ",") else { return nil }
            place += 1
        }
    }
}
