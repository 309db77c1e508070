/// What is asked for of a JSON object: the value of a key, or of keys of the object that is its value.
struct JSONKey {
    let name: [UInt8]
    /// The keys around it, each with its dot.
    let path: [UInt8]
    /// Whether it may be in upper case: nobody has named it.
    var ignoresCase = false
    var use: ColumnUse?
    var inner: [JSONKey] = []

    /// The keys of a mapping. `token.apn` is the key `apn` of the object `token`, or a key with a dot.
    static func keys(of mapping: ColumnMapping) -> [JSONKey] {
        var keys: [JSONKey] = []
        // A key that somebody has named is looked for before another spelling of it.
        for isNamed in [true, false] {
            for (column, use, _) in mapping.uses.filter({ $0.isNamed == isNamed }) {
                let index = add([column], use, to: &keys)
                if !isNamed { keys[index].ignoresCase = true }
                let path = column.split(separator: ".", omittingEmptySubsequences: false).map(String.init)
                if path.count > 1 { add(path[...], use, to: &keys) }
            }
        }
        return keys
    }

    /// - Returns: Which key the path begins with.
    @discardableResult
    private static func add(
        _ path: ArraySlice<String>, _ use: ColumnUse, within outer: [UInt8] = [], to keys: inout [JSONKey]
    ) -> Int {
        let first = Array((path.first ?? "").utf8)
        let index = keys.firstIndex { $0.name == first } ?? keys.count
        if index == keys.count { keys.append(JSONKey(name: first, path: outer)) }
        if path.count == 1 {
            keys[index].use = use
        } else {
            add(path.dropFirst(), use, within: outer + first + [UInt8(ascii: ".")], to: &keys[index].inner)
        }
        return index
    }

    /// Whether this text is the key.
    func isAt(_ range: Range<Int>, in bytes: [UInt8]) -> Bool {
        guard name.count == range.count else { return false }
        var place = range.lowerBound
        for character in name {
            let byte = bytes[place]
            let isUpper = ignoresCase && byte >= UInt8(ascii: "A") && byte <= UInt8(ascii: "Z")
            guard byte == character || isUpper && byte | 0x20 == character else { return false }
            place += 1
        }
        return true
    }
}

/// Reads one JSON object. Values that nobody asked for are only skipped.
struct JSONReader {
    let bytes: [UInt8]
    var place: Int
    let end: Int

    struct Fault: Error {
        let refusal: Refusal
    }

    private static let notJSON = Fault(refusal: Refusal("this is not a JSON object"))

    var isAtEnd: Bool { place >= end }

    mutating func skipBlanks() {
        while place < end, bytes[place].isBlank { place += 1 }
    }

    mutating func take(_ character: Character) throws(Fault) {
        guard place < end, bytes[place] == character.asciiValue else { throw Self.notJSON }
        place += 1
    }

    func isAt(_ character: Character) -> Bool { place < end && bytes[place] == character.asciiValue }

    /// Reads the whole text.
    mutating func object(_ keys: [JSONKey], mark: String, into row: inout ImportRow) throws(Fault) -> ImportRecord {
        var hasMark = false
        let members = try members(keys, mark: mark, &hasMark, into: &row)
        skipBlanks()
        guard isAtEnd else { throw Self.notJSON }
        return hasMark && members == 1 ? .nothing : .row
    }

    /// - Returns: How many members the object has.
    private mutating func members(
        _ keys: [JSONKey], mark: String, _ hasMark: inout Bool, into row: inout ImportRow
    ) throws(Fault) -> Int {
        var members = 0
        try take("{")
        skipBlanks()
        while !isAt("}") {
            if members > 0 { try take(",") }
            members += 1
            skipBlanks()
            let key = try key(keys, mark: mark, &hasMark, &row)
            skipBlanks()
            try take(":")
            skipBlanks()
            if let key, !key.inner.isEmpty, isAt("{") {
                var ignored = false
                _ = try self.members(key.inner, mark: mark, &ignored, into: &row)
            } else if let use = key?.use {
                try value(use, into: &row)
            } else {
                try skipValue()
            }
            skipBlanks()
        }
        place += 1
        return members
    }

    /// Reads a key. A key with escapes is compared as text.
    private mutating func key(
        _ keys: [JSONKey], mark: String, _ hasMark: inout Bool, _ row: inout ImportRow
    ) throws(Fault) -> JSONKey? {
        try take("\"")
        var close = place
        while close < end, bytes[close] != .quote, bytes[close] != .backslash { close += 1 }
        var name: [UInt8]?
        if close < end, bytes[close] == .backslash {
            var scratch = ImportRow()
            place -= 1
            scratch.begin()
            try string(into: &scratch)
            name = scratch.bytes
        } else {
            guard close < end else { throw Self.notJSON }
        }
        defer { if name == nil { place = close + 1 } }
        let (text, range) = (name ?? bytes, name?.indices ?? place..<close)
        if let key = keys.first(where: { $0.isAt(range, in: text) }) { return key }
        if mark.utf8.elementsEqual(text[range]) {
            hasMark = true
        } else {
            row.unread.note(text, range, path: keys.first?.path ?? [])
        }
        return nil
    }

    private mutating func value(_ use: ColumnUse, into row: inout ImportRow) throws(Fault) {
        guard place < end else { throw Self.notJSON }
        switch bytes[place] {
        case .quote:
            row.begin()
            try string(into: &row)
            row.end(use)
        case UInt8(ascii: "[") where use.field == .tags:
            try tags(into: &row)
        case UInt8(ascii: "["), UInt8(ascii: "{"):
            guard let field = use.field else { return try skipValue() }
            throw Fault(
                refusal: Refusal("\(field.name) is \(isAt("[") ? "an array" : "an object"), expected one value"))
        default:
            let start = place
            try skipLiteral()
            if Bytes.has(Array("null".utf8), in: bytes, at: start, to: place) { return }
            row.begin()
            row.append(bytes, start..<place)
            row.end(use)
        }
    }

    private mutating func tags(into row: inout ImportRow) throws(Fault) {
        try take("[")
        row.beginTagList()
        skipBlanks()
        var isFirst = true
        while !isAt("]") {
            if !isFirst { try take(",") }
            isFirst = false
            skipBlanks()
            try tag(into: &row)
            skipBlanks()
        }
        place += 1
    }

    /// A number, true and false are tags as they are written, and null is none: as in a table.
    private mutating func tag(into row: inout ImportRow) throws(Fault) {
        if isAt("[") || isAt("{") {
            throw Fault(refusal: Refusal("tags has an element that is an array or an object"))
        }
        row.begin()
        if isAt("\"") {
            try string(into: &row)
        } else {
            let start = place
            try skipLiteral()
            if Bytes.has(Array("null".utf8), in: bytes, at: start, to: place) { return }
            row.append(bytes, start..<place)
        }
        row.endTag()
    }

    /// A number, true, false or null.
    private mutating func skipLiteral() throws(Fault) {
        let start = place
        while place < end {
            switch bytes[place] {
            case UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "-"), UInt8(ascii: "+"), UInt8(ascii: "."),
                UInt8(ascii: "E"), UInt8(ascii: "a")...UInt8(ascii: "z"):
                place += 1
            default:
                if place == start { throw Self.notJSON }
                return
            }
        }
        throw Self.notJSON
    }

    mutating func string(into row: inout ImportRow) throws(Fault) {
        try take("\"")
        while true {
            guard place < end, bytes[place] >= 0x20 else { throw Self.notJSON }
            let byte = bytes[place]
            place += 1
            if byte == .quote { return }
            if byte == .backslash { try escape(into: &row) } else { row.append(byte) }
        }
    }

    private mutating func escape(into row: inout ImportRow) throws(Fault) {
        guard place < end else { throw Self.notJSON }
        let byte = bytes[place]
        place += 1
        switch byte {
        case .quote, .backslash, UInt8(ascii: "/"): row.append(byte)
        case UInt8(ascii: "b"): row.append(0x08)
        case UInt8(ascii: "f"): row.append(0x0C)
        case UInt8(ascii: "n"): row.append(0x0A)
        case UInt8(ascii: "r"): row.append(0x0D)
        case UInt8(ascii: "t"): row.append(0x09)
        case UInt8(ascii: "u"):
            var code = try unit()
            if (0xD800..<0xDC00).contains(code), Bytes.has(Array("\\u".utf8), in: bytes, at: place, to: end) {
                place += 2
                let low = try unit()
                guard (0xDC00..<0xE000).contains(low) else { throw Self.notJSON }
                code = 0x10000 + (code - 0xD800) << 10 + (low - 0xDC00)
            }
            guard let scalar = Unicode.Scalar(code) else { throw Self.notJSON }
            for byte in UTF8.encode(scalar) ?? .init() { row.append(byte) }
        default: throw Self.notJSON
        }
    }

    private mutating func unit() throws(Fault) -> UInt32 {
        guard place + 4 <= end else { throw Self.notJSON }
        var code: UInt32 = 0
        for _ in 0..<4 {
            guard let digit = bytes[place].hexValue else { throw Self.notJSON }
            code = code << 4 | UInt32(digit)
            place += 1
        }
        return code
    }

    /// Skips a value of any kind, by its brackets and strings.
    mutating func skipValue() throws(Fault) {
        var depth = 0
        repeat {
            guard place < end else { throw Self.notJSON }
            switch bytes[place] {
            case .quote:
                var scratch = ImportRow()
                try string(into: &scratch)
            case UInt8(ascii: "["), UInt8(ascii: "{"):
                depth += 1
                place += 1
            case UInt8(ascii: "]"), UInt8(ascii: "}"):
                depth -= 1
                guard depth >= 0 else { throw Self.notJSON }
                place += 1
            case UInt8(ascii: ","), UInt8(ascii: ":"):
                guard depth > 0 else { throw Self.notJSON }
                place += 1
            default:
                if bytes[place].isBlank { place += 1 } else { try skipLiteral() }
            }
        } while depth > 0
    }
}
