internal import TokenLedger
internal import TokenModel

/// What an import has done, and how to go on.
struct ImportOutcome {
    var lines: [String]
    var refused: Int64
    var isFinished: Bool
    /// Why nothing after some place in the file could be read; nil if it is not broken.
    var problem: ImportProblem?
}

/// Imports a file: reads it batch by batch, and commits each with the position behind it.
struct ImportRun {
    let file: String
    let reading: ImportOptions
    let rules: ImportRules
    /// The file for what is refused.
    let rejects: String
    let isDryRun: Bool
    let stop: ShutdownRequest

    private var queue: ImportSource.Queue { reading.queue }
    private var list: CompleteList? { reading.complete.map { CompleteList(name: $0, asOf: rules.asOf) } }

    /// The fields of `--column`.
    private var named: Set<ImportField> {
        Set(((try? reading.mapping())?.named ?? [:]).filter { !$0.value.isEmpty }.keys)
    }

    private func isStopped() -> Bool { stop.isAsked }

    /// Tells apart imports of different files, or of one file that is read in different ways.
    func identity(of input: borrowing ImportInput) -> String {
        "\(input.isFile ? input.fingerprint() : "stream")-\(reading.fingerprint(asOf: rules.asOf, rejects: rejects))"
    }

    func perform(
        _ input: borrowing ImportInput, restart: Bool, on connection: inout Connection
    ) throws -> ImportOutcome {
        let name = input.name
        let beginning = ImportPosition(identity: identity(of: input))
        if isDryRun { return try rehearse(input, from: beginning, on: &connection) }
        let (known, position) =
            try input.isFile && !restart ? unfinished(name, beginning, on: &connection) : (nil, beginning)
        var refused =
            if known == nil {
                try RejectFile(new: rejects)
            } else {
                try RejectFile(continuing: rejects, length: position.rejects)
            }
        var reader = ImportReader(try reading.makeFormat(), rules, from: position)
        if known == nil { try look(&reader, input) }
        try prepare(&reader, input, position)
        let source = try known ?? ImportSource.begin(name, position: position.text, list: list, on: &connection)
        if known != nil {
            let done = counted(position.lines, reader.items.one, reader.items.many)
            ConfigurationOptions.complain("continuing source \(source.id) after \(done)")
        }
        do {
            var complete = list.map(CompleteImport.init)
            let end = try queueAll(&reader, input, source, &refused, &complete, on: &connection)
            return outcome(reader, source, end, complete)
        } catch let error as DatabaseError where error.sqlState != "42501" {
            let remedy =
                input.isFile
                ? "run the same command again to continue source \(source.id)" : "import the same input again"
            ConfigurationOptions.complain("the import is interrupted: \(remedy)")
            throw error
        }
    }

    private func look(_ reader: inout ImportReader, _ input: borrowing ImportInput) throws {
        do {
            try reader.look(
                { buffer, count in try input.read(into: &buffer, filled: &count, isStopped: isStopped) },
                isStopped: isStopped)
        } catch let problem as ImportProblem {
            throw ImportProblem("\(file): \(problem)")
        }
    }

    /// The import of this file that can continue.
    private func unfinished(
        _ name: String, _ beginning: ImportPosition, on connection: inout Connection
    ) throws(DatabaseError) -> (ImportSource?, ImportPosition) {
        let sources = try ImportSource.unfinished(name, on: &connection)
        for source in sources {
            if let position = ImportPosition(source.position), position.identity == beginning.identity {
                return (source, position)
            }
        }
        if let other = sources.first {
            ConfigurationOptions.complain(
                "warning: source \(other.id), an import of \(HistoryText.plain(name)), was not finished. The file or the options have changed, so this is a new import"
            )
        }
        return (nil, beginning)
    }

    private func prepare(
        _ reader: inout ImportReader, _ input: borrowing ImportInput, _ position: ImportPosition
    ) throws {
        guard position.offset > 0 else { return }
        if reader.needsBeginning {
            try reader.readBeginning { buffer, count in
                try input.read(into: &buffer, filled: &count, isStopped: { false })
            }
        }
        try input.seek(to: position.offset)
    }

    /// How the reading of a file has ended.
    private enum End {
        case ofFile
        case interrupted
        case broken(ImportProblem)
    }

    private func queueAll(
        _ reader: inout ImportReader, _ input: borrowing ImportInput, _ source: ImportSource,
        _ refused: inout RejectFile, _ complete: inout CompleteImport?, on connection: inout Connection
    ) throws -> End {
        var progress = ProgressBar(
            file, items: reader.items.many, total: input.size, steps: reader.position.offset,
            count: reader.position.lines)
        defer { progress.finish() }
        var pace = QueuePace(stop: stop)
        var encoding = try ServerEncoding(of: &connection)
        if queue == .registration { try pace.wait(after: 0, &progress, on: &connection) }
        while true {
            let before = reader.position
            var batch = try next(&reader, input, source.id, &encoding, on: &connection)
            let records = reader.report(batch)
            do {
                try refused.append(records, begin: reader.rejectsBegin)
            } catch {
                throw ImportProblem(
                    "\(error.description): then run the same command again to continue source \(source.id)")
            }
            batch.position.rejects = refused.length
            let returned = try source.commit(
                batch.copy.bytes, to: queue, position: batch.position.text, queued: batch.queued,
                refused: batch.refused.count, isFinished: batch.isLast && complete == nil, isComplete: complete != nil,
                on: &connection)
            complete?.note(returned: returned)
            progress.advance(
                steps: batch.position.offset - before.offset, count: batch.position.lines - before.lines)
            if batch.isLast {
                return try finish(reader, source, batch.position, &complete, &pace, &progress, on: &connection)
            }
            if let problem = batch.problem { return .broken(problem) }
            // The queue of results is made for more than any file of feedback has.
            if queue == .registration { try pace.wait(after: Int64(batch.queued), &progress, on: &connection) }
            if isStopped() { return .interrupted }
        }
    }

    /// Of a complete list, logs out whom it does not have, unless a refused row may have them.
    private func finish(
        _ reader: ImportReader, _ source: ImportSource, _ position: ImportPosition, _ complete: inout CompleteImport?,
        _ pace: inout QueuePace, _ progress: inout ProgressBar, on connection: inout Connection
    ) throws -> End {
        guard var list = complete else { return .ofFile }
        defer { complete = list }
        let isEmpty = source.queued + Int64(reader.summary.queued) == 0
        if !isEmpty, source.refused + Int64(reader.summary.refused) == 0 {
            let isDone = try list.logOut(by: source, on: &connection) { rows, connection throws(DatabaseError) in
                try pace.wait(after: rows, &progress, on: &connection)
                return !isStopped()
            }
            if !isDone { return .interrupted }
        }
        try source.finish(at: position.text, on: &connection)
        return isEmpty
            ? .broken(ImportProblem("no row was queued, and an empty list would log everybody out")) : .ofFile
    }

    private func next(
        _ reader: inout ImportReader, _ input: borrowing ImportInput, _ sourceID: Int64,
        _ encoding: inout ServerEncoding, on connection: inout Connection
    ) throws -> ImportBatch {
        var batch = try reader.next(
            sourceID: sourceID,
            { buffer, count in try input.read(into: &buffer, filled: &count, isStopped: isStopped) },
            isStopped: isStopped)
        try batch.refuse { try encoding.lacks($0.characters, on: &connection) }
        let tokens = batch.doubtful.map { encoding.divisible($0.token) }
        reader.resolve(&batch, try TokenReading.read(tokens, isBase64: rules.isBase64, on: &connection))
        return batch
    }

    private func rehearse(
        _ input: borrowing ImportInput, from position: ImportPosition, on connection: inout Connection
    ) throws -> ImportOutcome {
        var reader = ImportReader(try reading.makeFormat(), rules, from: position)
        try look(&reader, input)
        var encoding = try ServerEncoding(of: &connection)
        var (isFinished, problem, complete) = (false, ImportProblem?.none, list.map(CompleteImport.Rehearsal.init))
        while !isFinished, problem == nil, !isStopped() {
            let batch = try next(&reader, input, 0, &encoding, on: &connection)
            _ = reader.report(batch)
            try complete?.note(batch.copy.bytes, on: &connection)
            (isFinished, problem) = (batch.isLast, batch.problem)
        }
        let summary = reader.summary
        let lines =
            [
                "\(file): \(counted(reader.position.records, "row", "rows")); would queue \(summary.queued), refuse \(summary.refused), skip \(summary.skipped)"
            ]
            + details(of: reader) + (try complete?.lines(refused: summary.refused, on: &connection) ?? [])
            + (summary.samples.isEmpty ? [] : ["the first refused rows:"])
            + summary.samples.map { "  \(HistoryText.plain($0))" }
        return ImportOutcome(
            lines: lines + (isFinished || problem != nil ? [] : ["interrupted"]), refused: Int64(summary.refused),
            isFinished: isFinished, problem: problem)
    }

    /// What a person should see of the file, and of what became of its rows.
    private func details(of reader: ImportReader) -> [String] {
        let summary = reader.summary
        return reader.unread.lines + summary.coverage(named: named, timeless: rules.timeless)
            + summary.missing(named: named) + (rules.topics.isEmpty ? summary.oddTopics : []) + summary.details
    }

    private var importAgain: String {
        "; fix them, and import that file with the same options and --as-of \(ShellWord.quoted(CopyText.text(rules.asOf)))"
    }

    private func outcome(
        _ reader: ImportReader, _ source: ImportSource, _ end: End, _ complete: CompleteImport?
    ) -> ImportOutcome {
        let summary = reader.summary
        let refused = source.refused + Int64(summary.refused)
        let queued = source.queued + Int64(summary.queued)
        var lines = [
            "\(file): \(counted(reader.position.records, "row", "rows")); queued \(queued), refused \(refused), skipped \(reader.position.skipped)"
        ]
        let details = details(of: reader)
        if source.queued + source.refused > 0, !details.isEmpty { lines.append("of these, in this run:") }
        lines += details
        let topic = TopicOption.typed(topic: reading.topic ?? "TOPIC", environment: rules.environment.rawValue)
        if let complete, case .ofFile = end {
            lines += complete.lines(
                refused: refused, undo: "tokenkeeperd reinstate --cause unregistered_by_app \(topic)")
        }
        if refused > 0 { lines.append("refused rows: \(rejects)\(complete == nil ? importAgain : "")") }
        if case .interrupted = end {
            lines.append("interrupted: run the same command again to continue source \(source.id)")
        }
        switch queue {
        case _ where queued == 0: break
        case .registration:
            lines.append("to undo: tokenkeeperd withdraw \(source.id)")
        case .result:
            lines.append("source \(source.id); to undo: tokenkeeperd reinstate --cause stale \(topic) --since TIME")
        }
        switch end {
        case .ofFile: return ImportOutcome(lines: lines, refused: refused, isFinished: true)
        case .interrupted: return ImportOutcome(lines: lines, refused: refused, isFinished: false)
        case .broken(let problem):
            return ImportOutcome(lines: lines, refused: refused, isFinished: false, problem: problem)
        }
    }
}
