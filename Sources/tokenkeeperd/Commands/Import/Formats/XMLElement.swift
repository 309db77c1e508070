/// An XML element with its attributes and the text of its children. It reads what data contract serializers write, and no more:
/// no entities of a DTD, no namespaces beyond the prefix.
struct XMLElement {
    /// As written, such as `i:type`.
    private(set) var attributes: [String: String] = [:]
    /// The text of each child, by name. Of a child that has children itself, nothing.
    private(set) var children: [String: String] = [:]
    /// Where the element ends.
    private(set) var end: Int

    private let bytes: [UInt8]
    private let limit: Int

    /// - Returns: Nil unless a well-formed element begins at `start` and ends before `limit`.
    init?(_ bytes: [UInt8], from start: Int, to limit: Int) {
        self.bytes = bytes
        self.limit = limit
        end = start
        guard let root = tag(), !root.isClosing else { return nil }
        attributes = root.attributes
        if root.isEmpty { return }
        var depth = 1
        var child: (name: String, text: [UInt8])?
        while depth > 0 {
            guard end < limit else { return nil }
            guard bytes[end] == UInt8(ascii: "<") else {
                guard let text = text() else { return nil }
                if depth == 2 { child?.text += text }
                continue
            }
            if let content = character() {
                if depth == 2 { child?.text += content }
                continue
            }
            if skipsComment() { continue }
            guard let tag = tag() else { return nil }
            if tag.isClosing {
                depth -= 1
                if depth == 1, let ended = child {
                    guard ended.name == tag.name else { return nil }
                    children[ended.name] = String(decoding: ended.text, as: UTF8.self)
                    child = nil
                }
                if depth == 0, tag.name != root.name { return nil }
            } else if !tag.isEmpty {
                depth += 1
                child = depth == 2 ? (tag.name, []) : nil
            }
        }
    }

    private struct Tag {
        var name: String
        var attributes: [String: String] = [:]
        var isClosing = false
        var isEmpty = false
    }

    private mutating func tag() -> Tag? {
        guard end < limit, bytes[end] == UInt8(ascii: "<") else { return nil }
        end += 1
        var tag = Tag(name: "")
        if end < limit, bytes[end] == UInt8(ascii: "/") {
            tag.isClosing = true
            end += 1
        }
        tag.name = name()
        if tag.name.isEmpty { return nil }
        while true {
            skipBlanks()
            guard end < limit else { return nil }
            switch bytes[end] {
            case UInt8(ascii: ">"):
                end += 1
                return tag
            case UInt8(ascii: "/"):
                guard end + 1 < limit, bytes[end + 1] == UInt8(ascii: ">") else { return nil }
                end += 2
                tag.isEmpty = true
                return tag
            default:
                let key = name()
                guard !key.isEmpty, end + 1 < limit, bytes[end] == UInt8(ascii: "=") else { return nil }
                let mark = bytes[end + 1]
                guard mark == .quote || mark == UInt8(ascii: "'"),
                    let close = Bytes.first(mark, in: bytes, from: end + 2, to: limit),
                    let value = Self.plain(bytes[(end + 2)..<close])
                else { return nil }
                tag.attributes[key] = String(decoding: value, as: UTF8.self)
                end = close + 1
            }
        }
    }

    private mutating func name() -> String {
        let start = end
        while end < limit, !bytes[end].isBlank, !"<>/='\"".utf8.contains(bytes[end]) { end += 1 }
        return String(decoding: bytes[start..<end], as: UTF8.self)
    }

    private mutating func skipBlanks() {
        while end < limit, bytes[end].isBlank { end += 1 }
    }

    /// Text up to the next tag.
    private mutating func text() -> [UInt8]? {
        guard let next = Bytes.first(UInt8(ascii: "<"), in: bytes, from: end, to: limit) else { return nil }
        defer { end = next }
        return Self.plain(bytes[end..<next])
    }

    /// `<![CDATA[…]]>`
    private mutating func character() -> [UInt8]? {
        let begin = Array("<![CDATA[".utf8)
        let close = Array("]]>".utf8)
        guard Bytes.has(begin, in: bytes, at: end, to: limit),
            let found = Bytes.first(close, in: bytes, from: end + begin.count, to: limit)
        else { return nil }
        defer { end = found + close.count }
        return Array(bytes[(end + begin.count)..<found])
    }

    private mutating func skipsComment() -> Bool {
        guard Bytes.has(Array("<!--".utf8), in: bytes, at: end, to: limit),
            let close = Bytes.first(Array("-->".utf8), in: bytes, from: end, to: limit)
        else { return false }
        end = close + 3
        return true
    }

    /// Replaces the entities.
    private static func plain(_ source: ArraySlice<UInt8>) -> [UInt8]? {
        guard source.contains(UInt8(ascii: "&")) else { return Array(source) }
        var plain: [UInt8] = []
        var place = source.startIndex
        while place < source.endIndex {
            guard source[place] == UInt8(ascii: "&") else {
                plain.append(source[place])
                place += 1
                continue
            }
            guard let close = source[place...].firstIndex(of: UInt8(ascii: ";")) else { return nil }
            let name = String(decoding: source[(place + 1)..<close], as: UTF8.self)
            let code: UInt32? =
                if name.hasPrefix("#x") {
                    UInt32(name.dropFirst(2), radix: 16)
                } else if name.hasPrefix("#") {
                    UInt32(name.dropFirst())
                } else {
                    ["amp": 0x26, "lt": 0x3C, "gt": 0x3E, "quot": 0x22, "apos": 0x27][name]
                }
            guard let code, let scalar = Unicode.Scalar(code) else { return nil }
            plain.append(contentsOf: UTF8.encode(scalar) ?? .init())
            place = close + 1
        }
        return plain
    }
}
