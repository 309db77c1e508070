/// Comma-separated values as in RFC 4180 (https://www.rfc-editor.org/rfc/rfc4180), and what programs make of it: another delimiter,
/// a byte order mark, lines that end in LF or CR LF.
///
/// A record of several lines that is malformed is refused line by line: a quote that is never closed costs its own line only.
struct CSVFormat: ImportFormat {
    /// What the first column of a file of refused records is called, and what its values begin with.
    static let mark = "tokenkeeperd"
    private static let marker = Array("\(mark): line ".utf8)

    private let delimiter: UInt8
    private let mapping: ColumnMapping
    private let hasHeader: Bool
    /// The use of each column; nil until the header has been read.
    private var uses: [ColumnUse?]?
    /// The cells of the current record.
    private var cells: [Cell] = []
    private var isAtBeginning = true
    /// Whether this is a file of refused records.
    private var isMarked = false
    private(set) var rejectsBegin: [UInt8] = []

    /// Where the content of a cell is.
    private struct Cell {
        let start: Int
        let end: Int
        /// Whether it contains doubled quotes.
        var isEscaped = false
        /// Whether it contains a line break.
        var isLong = false
    }

    private enum Line {
        case needsMore
        /// - next: Where the next record begins.
        case record(end: Int, next: Int, lines: Int)
        case malformed(Refusal)
    }

    init(_ mapping: ColumnMapping, delimiter: UInt8 = UInt8(ascii: ","), hasHeader: Bool = true) throws(ImportProblem) {
        self.delimiter = delimiter
        self.mapping = mapping
        self.hasHeader = hasHeader
        if !hasHeader { uses = try mapping.usesByNumber() }
    }

    var needsBeginning: Bool { uses == nil }
    var faultAtEnd: String? { uses == nil ? "the file is empty, expected a header" : nil }

    func lacks(_ field: ImportField) -> Bool { uses.map { !$0.contains { $0?.field == field } } ?? false }

    mutating func next(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) throws(ImportProblem) -> ImportScan {
        var start = start
        if isAtBeginning {
            guard start + 3 <= end || what == .file else { return .needsMore }
            if Bytes.has(Bytes.byteOrderMark, in: bytes, at: start, to: end) { start += 3 }
            if start == end { return .found(.nothing, end: end, lines: 0) }
        }
        switch split(bytes, from: start, to: end, then: what) {
        case .needsMore:
            return .needsMore
        case .malformed(let refusal):
            if uses == nil { throw ImportProblem("the header is malformed: \(refusal.text)") }
            return firstLine(refusal, in: bytes, from: start, to: end)
        case .record(let contentEnd, let next, let lines):
            isAtBeginning = false
            if contentEnd == start { return .found(.nothing, end: next, lines: lines) }
            guard let uses else {
                try readHeader(bytes, start..<next, &row.unread)
                return .found(.nothing, end: next, lines: lines)
            }
            if let refusal = fill(&row, bytes, uses) {
                return lines == 1
                    ? .found(.refused(refusal), end: next, lines: 1)
                    : firstLine(refusal, in: bytes, from: start, to: end)
            }
            return .found(.row, end: next, lines: lines)
        }
    }

    /// Refuses the first line of a record, and goes on after it.
    private func firstLine(_ refusal: Refusal, in bytes: [UInt8], from start: Int, to end: Int) -> ImportScan {
        let newline = Bytes.first(.newline, in: bytes, from: start, to: end)
        return .found(.refused(refusal), end: newline.map { $0 + 1 } ?? end, lines: newline == nil ? 0 : 1)
    }

    /// Finds the cells of a record.
    private mutating func split(_ bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd) -> Line {
        cells.removeAll(keepingCapacity: true)
        var place = start
        var lines = 1
        while true {
            var cell: Cell
            if place < end, bytes[place] == .quote {
                let content = place + 1
                var isEscaped = false
                let linesBefore = lines
                place = content
                while true {
                    if place >= end { return Self.unended(what, Refusal("a quote is not closed")) }
                    let byte = bytes[place]
                    if byte == .newline {
                        lines += 1
                    } else if byte == .quote {
                        if place + 1 >= end, what == .more { return .needsMore }
                        guard place + 1 < end, bytes[place + 1] == .quote else { break }
                        isEscaped = true
                        place += 1
                    }
                    place += 1
                }
                cell = Cell(start: content, end: place, isEscaped: isEscaped, isLong: lines > linesBefore)
                place += 1
            } else {
                let content = place
                while place < end, bytes[place] != delimiter, bytes[place] != .newline { place += 1 }
                var contentEnd = place
                if place < end, bytes[place] == .newline, contentEnd > content, bytes[contentEnd - 1] == .carriageReturn
                {
                    contentEnd -= 1
                }
                cell = Cell(start: content, end: contentEnd)
            }
            cells.append(cell)
            if place < end, bytes[place] == .carriageReturn {
                if place + 1 >= end, what == .more { return .needsMore }
                if place + 1 >= end || bytes[place + 1] == .newline { place += 1 }
            }
            if place >= end {
                if what == .file { return .record(end: end, next: end, lines: lines) }
                return Self.unended(what, PartEnd.tooLong)
            }
            switch bytes[place] {
            case delimiter: place += 1
            case .newline: return .record(end: cell.end, next: place + 1, lines: lines)
            default: return .malformed(Refusal("text follows a closing quote"))
            }
        }
    }

    private static func unended(_ what: PartEnd, _ refusal: Refusal) -> Line {
        what == .more ? .needsMore : .malformed(refusal)
    }

    private mutating func readHeader(
        _ bytes: [UInt8], _ range: Range<Int>, _ unread: inout UnreadColumns
    ) throws(ImportProblem) {
        var names: [String] = []
        for cell in cells {
            var content = Array(bytes[cell.start..<cell.end])
            if cell.isEscaped { content = Self.unescaped(content) }
            names.append(String(decoding: content[Bytes.trimmed(content, content.indices)], as: UTF8.self))
        }
        let uses = try mapping.uses(of: names)
        self.uses = uses
        for (name, use) in zip(names, uses) where use == nil && name != Self.mark {
            unread.note(Array(name.utf8), 0..<name.utf8.count)
        }
        rejectsBegin = Array(Self.mark.utf8) + [delimiter]
        // A file of refused records has the column already.
        let afterMark = cells[0].end + (bytes[range.lowerBound] == .quote ? 2 : 1)
        isMarked = names.first == Self.mark
        rejectsBegin += bytes[(isMarked ? afterMark : range.lowerBound)..<range.upperBound]
        if rejectsBegin.last != .newline { rejectsBegin.append(.newline) }
    }

    private static func unescaped(_ content: [UInt8]) -> [UInt8] {
        var plain: [UInt8] = []
        var place = 0
        while place < content.count {
            plain.append(content[place])
            place += content[place] == .quote ? 2 : 1
        }
        return plain
    }

    /// Where the value is: a token may have a line break at its end.
    private static func content(of cell: Cell, for use: ColumnUse, in bytes: [UInt8]) -> Range<Int> {
        let range = cell.start..<cell.end
        return cell.isLong && use.field == .token ? Bytes.trimmed(bytes, range) : range
    }

    /// - Returns: Why the record is refused, if it is.
    private func fill(_ row: inout ImportRow, _ bytes: [UInt8], _ uses: [ColumnUse?]) -> Refusal? {
        var shift = 0
        if hasHeader {
            let marked = isMarked ? 1 : 0
            guard cells.count == uses.count else {
                return Refusal(
                    "the number of cells is not that of the header",
                    "\(cells.count - marked) instead of \(uses.count - marked)")
            }
        } else {
            if Bytes.has(Self.marker, in: bytes, at: cells[0].start, to: cells[0].end) { shift = 1 }
            guard cells.count - shift >= uses.count else {
                return Refusal(
                    "the line has too few cells", "\(cells.count - shift), expected at least \(uses.count)")
            }
        }
        for index in uses.indices {
            guard let use = uses[index] else { continue }
            let cell = cells[index + shift]
            let content = Self.content(of: cell, for: use, in: bytes)
            // Rather a quote that is missing here, and closed somewhere below, than a name of two lines.
            if cell.isLong, Bytes.first(.newline, in: bytes, from: content.lowerBound, to: content.upperBound) != nil {
                return Refusal("\(use.field?.name ?? "a filter's column") has a line break, or a quote is not closed")
            }
            row.begin()
            if cell.isEscaped {
                var place = content.lowerBound
                while place < content.upperBound {
                    row.append(bytes[place])
                    place += bytes[place] == .quote ? 2 : 1
                }
            } else {
                row.append(bytes, content)
            }
            row.end(use)
        }
        return nil
    }

    /// One more column in front: at the end, it would count as one of the columns that a short line lacks.
    func append(refused record: ArraySlice<UInt8>, line: Int, cause: String, to rejects: inout [UInt8]) {
        rejects.append(.quote)
        rejects.append(contentsOf: Self.marker)
        rejects.append(contentsOf: "\(line): \(cause)".utf8.flatMap { $0 == .quote ? [.quote, .quote] : [$0] })
        rejects.append(.quote)
        rejects.append(delimiter)
        rejects.append(contentsOf: withoutMark(record))
        if rejects.last != .newline { rejects.append(.newline) }
    }

    /// A record from a file of refused records has the cause of that time in front.
    private func withoutMark(_ record: ArraySlice<UInt8>) -> ArraySlice<UInt8> {
        let isQuoted = record.first == .quote
        guard record.dropFirst(isQuoted ? 1 : 0).starts(with: Self.marker) else { return record }
        var place = record.startIndex + (isQuoted ? 1 : 0)
        while place < record.endIndex {
            if isQuoted, record[place] == .quote {
                guard place + 1 < record.endIndex, record[place + 1] == .quote else { break }
                place += 1
            } else if !isQuoted, record[place] == delimiter {
                break
            }
            place += 1
        }
        return record[min(place + (isQuoted ? 2 : 1), record.endIndex)...]
    }
}
