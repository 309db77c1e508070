/// JSON Lines: one object on each line (https://jsonlines.org).
struct JSONLinesFormat: ImportFormat {
    /// The only key of a line that says why the next one was refused.
    static let mark = "tokenkeeperd"

    private let keys: [(key: [UInt8], field: ImportField)]

    var isByLine: Bool { true }

    init(_ mapping: ColumnMapping) {
        keys = ImportField.mappable.compactMap { field in
            (mapping.named[field] ?? (field.isFoundByName ? field.name : nil)).map { (Array($0.utf8), field) }
        }
    }

    func fault(of beginning: ArraySlice<UInt8>) -> String? {
        let text = beginning.starts(with: Bytes.byteOrderMark) ? beginning.dropFirst(3) : beginning
        let line = text.drop { $0.isBlank }.prefix { $0 != .newline }
        // As it is printed for people.
        let isOpen = line.first == UInt8(ascii: "{") && line.dropFirst().allSatisfy(\.isBlank)
        return line.first == UInt8(ascii: "[") || isOpen
            ? "the file is one JSON document, expected an object on each line: make them with jq -c '.[]', or with '.NAME[]' for a list within an object"
            : nil
    }

    mutating func next(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) -> ImportScan {
        let newline = Bytes.first(.newline, in: bytes, from: start, to: end)
        if newline == nil, what == .more { return .needsMore }
        let next = newline.map { $0 + 1 } ?? end
        let lines = newline == nil ? 0 : 1
        if newline == nil, what == .limit { return .found(.refused(PartEnd.tooLong), end: next, lines: lines) }
        var place = start
        if Bytes.has(Bytes.byteOrderMark, in: bytes, at: place, to: end) { place += 3 }
        var reader = JSONLineReader(bytes: bytes, place: place, end: newline ?? end)
        reader.skipBlanks()
        if reader.isAtEnd { return .found(.nothing, end: next, lines: lines) }
        do {
            return .found(try reader.object(keys, mark: Self.mark, into: &row), end: next, lines: lines)
        } catch {
            return .found(.refused(error.refusal), end: next, lines: lines)
        }
    }

    /// A line of its own, so that each line stays as it was, and is JSON if it was.
    func append(refused record: ArraySlice<UInt8>, line: Int, cause: String, to rejects: inout [UInt8]) {
        rejects.append(contentsOf: "{\"\(Self.mark)\":\"line \(line): \(Self.escaped(cause))\"}\n".utf8)
        rejects.append(contentsOf: record)
        if rejects.last != .newline { rejects.append(.newline) }
    }

    private static func escaped(_ text: String) -> String {
        var escaped = ""
        for scalar in text.unicodeScalars {
            switch scalar {
            case "\"": escaped += "\\\""
            case "\\": escaped += "\\\\"
            default: escaped.unicodeScalars.append(scalar.value < 0x20 ? " " : scalar)
            }
        }
        return escaped
    }
}

/// Reads one JSON object. Values that nobody asked for are only skipped.
private struct JSONLineReader {
    let bytes: [UInt8]
    var place: Int
    let end: Int

    struct Fault: Error {
        let refusal: Refusal
    }

    private static let notJSON = Fault(refusal: Refusal("the line is not a JSON object"))

    var isAtEnd: Bool { place >= end }

    mutating func skipBlanks() {
        while place < end, bytes[place].isBlank { place += 1 }
    }

    private mutating func take(_ character: Character) throws(Fault) {
        guard place < end, bytes[place] == character.asciiValue else { throw Self.notJSON }
        place += 1
    }

    private func isAt(_ character: Character) -> Bool { place < end && bytes[place] == character.asciiValue }

    mutating func object(
        _ keys: [(key: [UInt8], field: ImportField)], mark: String, into row: inout ImportRow
    ) throws(Fault) -> ImportRecord {
        var members = 0
        var hasMark = false
        try take("{")
        skipBlanks()
        while !isAt("}") {
            if members > 0 { try take(",") }
            members += 1
            skipBlanks()
            let field = try key(keys, mark: mark, &hasMark, &row)
            skipBlanks()
            try take(":")
            skipBlanks()
            if let field { try value(field, into: &row) } else { try skipValue() }
            skipBlanks()
        }
        place += 1
        skipBlanks()
        guard isAtEnd else { throw Self.notJSON }
        return hasMark && members == 1 ? .nothing : .row
    }

    /// Reads a key. A key with escapes is compared as text.
    private mutating func key(
        _ keys: [(key: [UInt8], field: ImportField)], mark: String, _ hasMark: inout Bool, _ row: inout ImportRow
    ) throws(Fault) -> ImportField? {
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
        for (key, field) in keys {
            if let name {
                if name == key { return field }
            } else if key.count == close - place, Bytes.has(key, in: bytes, at: place, to: close) {
                return field
            }
        }
        if name == nil, mark.utf8.elementsEqual(bytes[place..<close]) { hasMark = true }
        return nil
    }

    private mutating func value(_ field: ImportField, into row: inout ImportRow) throws(Fault) {
        guard place < end else { throw Self.notJSON }
        switch bytes[place] {
        case .quote:
            row.begin()
            try string(into: &row)
            row.end(field)
        case UInt8(ascii: "[") where field == .tags:
            try tags(into: &row)
        case UInt8(ascii: "["), UInt8(ascii: "{"):
            throw Fault(
                refusal: Refusal("\(field.name) is \(isAt("[") ? "an array" : "an object"), expected one value"))
        default:
            let start = place
            try skipLiteral()
            if Bytes.has(Array("null".utf8), in: bytes, at: start, to: place) { return }
            row.begin()
            row.append(bytes, start..<place)
            row.end(field)
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
            guard isAt("\"") else { throw Fault(refusal: Refusal("tags has an element that is not a string")) }
            row.begin()
            try string(into: &row)
            row.endTag()
            skipBlanks()
        }
        place += 1
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

    private mutating func string(into row: inout ImportRow) throws(Fault) {
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
    private mutating func skipValue() throws(Fault) {
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
