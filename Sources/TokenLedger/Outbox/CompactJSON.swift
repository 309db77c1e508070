/// The text of a `jsonb` without the blanks that PostgreSQL writes after colons and commas: APNs counts every byte.
///
/// - Parameter text: Valid JSON.
func compactJSON(_ text: String) -> [UInt8] {
    var compact: [UInt8] = []
    let text = text.utf8.span
    compact.reserveCapacity(text.count)
    var isQuoted = false
    var place = 0
    while place < text.count {
        let byte = text[place]
        place += 1
        switch byte {
        case UInt8(ascii: "\\") where isQuoted && place < text.count:
            compact.append(byte)
            compact.append(text[place])
            place += 1
            continue
        case UInt8(ascii: "\""): isQuoted.toggle()
        case UInt8(ascii: " ") where !isQuoted: continue
        default: break
        }
        compact.append(byte)
    }
    return compact
}
