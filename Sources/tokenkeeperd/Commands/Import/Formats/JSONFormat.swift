internal import TokenModel

/// JSON: one object on each line (https://jsonlines.org), or one array of objects, of any length.
struct JSONFormat: ImportFormat {
    /// The only key of a line that says why the next one was refused.
    static let mark = "tokenkeeperd"

    private enum Shape { case lines, array }

    private let keys: [JSONKey]
    /// The key of the token; nil if it is not read.
    private let token: (column: String, isNamed: Bool)?
    /// Nil until the beginning has been read.
    private var shape: Shape?

    init(_ mapping: ColumnMapping) {
        keys = JSONKey.keys(of: mapping)
        token = mapping.uses.first { $0.use.field == .token }.map { (column: $0.column, isNamed: $0.isNamed) }
    }

    var needsBeginning: Bool { shape == nil }
    var items: (one: String, many: String) { shape == .array ? ("element", "elements") : ("line", "lines") }
    var faultAtEnd: String? { shape == .array ? "the array is not closed: the file is cut off" : nil }

    func fault(of beginning: ArraySlice<UInt8>) -> String? {
        let text = Array(
            (beginning.starts(with: Bytes.byteOrderMark) ? beginning.dropFirst(3) : beginning).drop { $0.isBlank })
        guard text.first == UInt8(ascii: "{") else { return nil }
        let line = Array(text.prefix { $0 != .newline })
        let following = text.dropFirst(line.count + 1).first
        if following == UInt8(ascii: "{") { return nil }
        if Self.end(of: line, from: 0, to: line.count) != nil { return Self.hasList(line) ? Self.oneObject : nil }
        guard let end = Self.end(of: text, from: 0, to: text.count) else { return Self.oneObject }
        let isAlone = text[end...].allSatisfy(\.isBlank)
        return isAlone && Self.hasList(Array(text[..<end])) ? Self.oneObject : Self.longObjects
    }

    private static let oneObject =
        "the file is one JSON object, expected an array, or an object on each line: make them with jq -c '.NAME[]' of a list within it"
    private static let longObjects =
        "the first object takes several lines, expected an object on each line, or an array: make them with jq -c ."

    /// Whether its first value is an array of objects, as in `{"results":[{`, or an empty one.
    private static func hasList(_ object: [UInt8]) -> Bool {
        let plain = object.filter { !$0.isBlank }
        guard let colon = Bytes.first(UInt8(ascii: ":"), in: plain, from: 0, to: plain.count) else { return false }
        return [":[{", ":[]"].contains { Bytes.has(Array($0.utf8), in: plain, at: colon, to: plain.count) }
    }

    mutating func next(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) throws(ImportProblem) -> ImportScan {
        switch shape {
        case .lines: line(in: bytes, from: start, to: end, then: what, into: &row)
        case .array: try element(in: bytes, from: start, to: end, then: what, into: &row)
        case nil: begin(in: bytes, from: start, to: end, then: what)
        }
    }

    /// Decides by the first character.
    private mutating func begin(in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd) -> ImportScan {
        guard start + 3 <= end || what != .more else { return .needsMore }
        var place = start
        if Bytes.has(Bytes.byteOrderMark, in: bytes, at: place, to: end) { place += 3 }
        while place < end, bytes[place].isBlank { place += 1 }
        if place == end, what == .more { return .needsMore }
        let isArray = place < end && bytes[place] == UInt8(ascii: "[")
        shape = isArray ? .array : .lines
        // Blank lines count.
        return .found(.nothing, end: isArray ? place + 1 : start, lines: 0)
    }

    private func line(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) -> ImportScan {
        let newline = Bytes.first(.newline, in: bytes, from: start, to: end)
        if newline == nil, what == .more { return .needsMore }
        let next = newline.map { $0 + 1 } ?? end
        let lines = newline == nil ? 0 : 1
        if newline == nil, what == .limit { return .found(.refused(PartEnd.tooLong), end: next, lines: lines) }
        var place = start
        if Bytes.has(Bytes.byteOrderMark, in: bytes, at: place, to: end) { place += 3 }
        return .found(object(in: bytes, place..<(newline ?? end), into: &row), end: next, lines: lines)
    }

    private func object(in bytes: [UInt8], _ range: Range<Int>, into row: inout ImportRow) -> ImportRecord {
        var reader = JSONReader(bytes: bytes, place: range.lowerBound, end: range.upperBound)
        reader.skipBlanks()
        if reader.isAtEnd { return .nothing }
        do {
            let record = try reader.object(keys, mark: Self.mark, into: &row)
            if record == .row, row[.token] == nil, let token {
                reader.place = range.lowerBound
                reader.skipBlanks()
                row.absence = reader.absence(of: token.column, ignoresCase: !token.isNamed)
            }
            return record
        } catch {
            return .refused(error.refusal)
        }
    }

    /// An element of the array. It ends with its brackets, or before the next comma: one that is malformed costs itself.
    private func element(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) throws(ImportProblem) -> ImportScan {
        var place = start
        while place < end, bytes[place].isBlank || bytes[place] == UInt8(ascii: ",") { place += 1 }
        if place == end || place > start { return .found(.nothing, end: place, lines: 0) }
        if bytes[place] == UInt8(ascii: "]") {
            place += 1
            while place < end, bytes[place].isBlank { place += 1 }
            if place < end || what == .limit { throw ImportProblem("something follows the array") }
            return what == .file ? .ended : .needsMore
        }
        guard let close = Self.end(of: bytes, from: place, to: end) else {
            switch what {
            case .more: return .needsMore
            case .limit: throw ImportProblem("an element is longer than 1 MiB, or is not closed")
            case .file: throw ImportProblem(faultAtEnd ?? "")
            }
        }
        return .found(object(in: bytes, place..<close, into: &row), end: close, lines: 1)
    }

    /// Where a value ends, by its brackets and strings; nil if it does not.
    private static func end(of bytes: [UInt8], from start: Int, to end: Int) -> Int? {
        var (place, depth, isString) = (start, 0, false)
        while place < end {
            let byte = bytes[place]
            switch byte {
            case .backslash where isString: place += 1
            case .quote: isString.toggle()
            case _ where isString: break
            case UInt8(ascii: "{"), UInt8(ascii: "["): depth += 1
            case UInt8(ascii: "}"), UInt8(ascii: "]"):
                if depth == 0 { return max(place, start + 1) }
                depth -= 1
                if depth == 0 { return place + 1 }
            case UInt8(ascii: ",") where depth == 0: return place
            default: break
            }
            place += 1
        }
        return nil
    }

    /// A line of its own, so that each line stays as it was, and is JSON if it was. An element becomes a line.
    func append(refused record: ArraySlice<UInt8>, line: Int, cause: String, to rejects: inout [UInt8]) {
        rejects.append(contentsOf: "{\"\(Self.mark)\":\"\(items.one) \(line): \(Self.escaped(cause))\"}\n".utf8)
        if shape == .array {
            rejects.append(contentsOf: record.lazy.map { $0 == .newline || $0 == .carriageReturn ? 0x20 : $0 })
        } else {
            rejects.append(contentsOf: record)
        }
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
