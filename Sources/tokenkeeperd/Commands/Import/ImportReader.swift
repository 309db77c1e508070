internal import TokenLedger
internal import TokenModel

/// Reads a file batch by batch. It does no input or output itself.
struct ImportReader {
    private var format: any ImportFormat
    private let rules: ImportRules
    private var buffer = [UInt8](repeating: 0, count: PartEnd.longestRecord)
    /// What is read and not used yet.
    private var start = 0
    private var filled = 0
    private var hasEnded = false
    private var row = ImportRow()
    private(set) var position: ImportPosition
    private(set) var summary: ImportSummary

    /// Reads more of the file behind what is filled.
    ///
    /// - Returns: False at the end, or if there is nothing for now.
    typealias Fill = (inout [UInt8], inout Int) throws -> Bool

    init(_ format: any ImportFormat, _ rules: ImportRules, from position: ImportPosition) {
        self.format = format
        self.rules = rules
        self.position = position
        summary = ImportSummary(ImportField.of(rules.queue))
    }

    var rejectsBegin: [UInt8] { format.rejectsBegin }
    var items: (one: String, many: String) { format.items }
    var needsBeginning: Bool { format.needsBeginning && position.offset > 0 }
    var unread: UnreadColumns { row.unread }

    /// Looks at the beginning, and uses up nothing: a file that cannot be imported at all is refused before anything has begun.
    mutating func look(_ fill: Fill, isStopped: () -> Bool) throws {
        var (format, row, place) = (self.format, ImportRow(), 0)
        while !isStopped() {
            if filled >= 6 || hasEnded, let fault = FileKind.fault(of: buffer.prefix(filled)) {
                throw ImportProblem(fault)
            }
            let isWhole = filled == buffer.count || hasEnded
            if isWhole || buffer.prefix(filled).contains(.newline), let fault = format.fault(of: buffer.prefix(filled))
            {
                throw ImportProblem(fault)
            }
            if isWhole, Self.hasLinesOfCR(buffer.prefix(filled)) {
                throw ImportProblem("the lines end with CR only: convert the file with tr '\\r' '\\n'")
            }
            if place < filled {
                let what: PartEnd = hasEnded ? .file : filled == buffer.count ? .limit : .more
                switch try format.next(in: buffer, from: place, to: filled, then: what, into: &row) {
                case .found(.nothing, let end, _):
                    place = end
                    continue
                case .found, .ended: return try check(format)
                case .needsMore: break
                }
            }
            if hasEnded {
                if let fault = format.faultAtEnd { throw ImportProblem(fault) }
                return try check(format)
            }
            if filled == buffer.count { return }
            if try !fill(&buffer, &filled) { hasEnded = !isStopped() }
        }
    }

    private func check(_ format: any ImportFormat) throws(ImportProblem) {
        if rules.topic == nil, format.lacks(.topic) {
            throw ImportProblem("no column has the topic: give --topic, or name the column with --column topic=NAME")
        }
    }

    private static func hasLinesOfCR(_ bytes: ArraySlice<UInt8>) -> Bool {
        bytes.contains(UInt8(ascii: "\r")) && !bytes.contains(.newline)
    }

    /// Reads the header again, for an import that continues. The file is at its beginning; afterwards it must be set to the position.
    mutating func readBeginning(_ fill: Fill) throws {
        while format.needsBeginning {
            guard case .found(.nothing, let end, _)? = try scan(fill, isStopped: { false }) else {
                throw ImportProblem("the file has no header any more")
            }
            start = end
        }
        (start, filled, hasEnded) = (0, 0, false)
    }

    /// Reads the next batch.
    ///
    /// - Parameters:
    ///   - sourceID: Of the import.
    ///   - isStopped: Whether to end the batch early. Asked at each record.
    mutating func next(sourceID: Int64, _ fill: Fill, isStopped: () -> Bool) throws -> ImportBatch {
        let source = Array("\(sourceID)".utf8)
        let before = position.records
        var batch = ImportBatch(position: position)
        while !batch.isFull(since: before), !isStopped() {
            let scanned: ImportScan?
            do {
                scanned = try scan(fill, isStopped: isStopped)
            } catch let problem as ImportProblem where position.records > 0 {
                // The records before the break are good.
                batch.problem = broken(problem)
                break
            }
            guard case .found(let record, let end, let lines)? = scanned else {
                batch.isLast = hasEnded
                break
            }
            // Scanning may have moved the record to the beginning of the buffer.
            let begin = start
            let number = position.lines + 1
            start = end
            position.offset += Int64(end - begin)
            position.lines += Int64(lines)
            note(record, number: number, in: begin..<end, source, &batch)
            if case .refused = record, lines == 0, !hasEnded {
                try skipLine(fill, isStopped: isStopped)
            }
            batch.position = position
        }
        batch.position = position
        return batch
    }

    private func broken(_ problem: ImportProblem) -> ImportProblem {
        let read = counted(position.records, items.one, items.many)
        return ImportProblem(
            "after \(read), at byte \(position.offset), counted from 0: \(problem.description). Nothing from there on is imported"
        )
    }

    private mutating func note(
        _ record: ImportRecord, number: Int64, in range: Range<Int>, _ source: [UInt8], _ batch: inout ImportBatch
    ) {
        switch record {
        case .nothing:
            return
        case .skipped(let reason):
            skip(reason)
        case .refused(let refusal):
            refuse(refusal, number, range, &batch)
        case .row:
            switch rules.judge(row, sourceID: source, into: &batch.copy) {
            case .queued:
                batch.queued += 1
                summary.note(rules.traits(of: row), token: row[.token]?.count ?? 0)
            case .doubtful(let token):
                let prefix = batch.copy.takeRow()
                batch.doubtful.append(
                    ImportBatch.DoubtfulRow(
                        number: number, bytes: Array(buffer[range]), row: prefix, traits: rules.traits(of: row),
                        token: String(decoding: row.bytes[token], as: UTF8.self)))
            case .skipped(let reason):
                skip(reason)
            case .refused(let refusal):
                refuse(refusal, number, range, &batch)
            }
        }
        position.records += 1
    }

    /// Skips the rest of a line that is longer than a record may be.
    private mutating func skipLine(_ fill: Fill, isStopped: () -> Bool) throws {
        while true {
            let newline = Bytes.first(.newline, in: buffer, from: start, to: filled)
            position.offset += Int64((newline.map { $0 + 1 } ?? filled) - start)
            if let newline {
                start = newline + 1
                position.lines += 1
                return
            }
            (start, filled) = (0, 0)
            if try !fill(&buffer, &filled) {
                hasEnded = !isStopped()
                return
            }
        }
    }

    private mutating func skip(_ reason: String) {
        position.skipped += 1
        summary.skip(reason)
    }

    /// Adds the doubtful rows to a batch, as the database reads their tokens.
    mutating func resolve(_ batch: inout ImportBatch, _ readings: [TokenReading]) {
        for (row, reading) in zip(batch.doubtful, readings) {
            if case .token(let hex) = reading { summary.note(row.traits, token: hex.utf8.count) }
        }
        batch.resolve(readings)
        batch.position.skipped = position.skipped
    }

    private mutating func refuse(
        _ refusal: Refusal, _ number: Int64, _ range: Range<Int>, _ batch: inout ImportBatch
    ) {
        batch.refused.append(ImportBatch.RefusedRecord(number: number, bytes: Array(buffer[range]), refusal: refusal))
    }

    /// Finds the next record, and reads as much as it needs.
    ///
    /// - Returns: Nil at the end, or if there is nothing for now.
    private mutating func scan(_ fill: Fill, isStopped: () -> Bool) throws -> ImportScan? {
        while true {
            if start < filled {
                row.clear()
                let what: PartEnd = hasEnded ? .file : start == 0 && filled == buffer.count ? .limit : .more
                let scan = try format.next(in: buffer, from: start, to: filled, then: what, into: &row)
                if scan == .ended { return nil }
                if scan != .needsMore { return scan }
            } else if hasEnded {
                if let fault = format.faultAtEnd { throw ImportProblem(fault) }
                return nil
            }
            if start > 0 {
                buffer.replaceSubrange(0..<(filled - start), with: Array(buffer[start..<filled]))
                filled -= start
                start = 0
            }
            if try !fill(&buffer, &filled) {
                if isStopped() { return nil }
                hasEnded = true
            }
        }
    }

    /// Counts what a batch has become.
    ///
    /// - Returns: What it refused, for the file of the refused records.
    mutating func report(_ batch: ImportBatch) -> [UInt8] {
        var records: [UInt8] = []
        summary.queue(batch.queued)
        for refused in batch.refused {
            summary.refuse(refused.refusal, item: items.one, number: refused.number)
            let cause = HistoryText.plain(refused.refusal.text)
            format.append(refused: refused.bytes[...], line: Int(refused.number), cause: cause, to: &records)
        }
        return records
    }
}
