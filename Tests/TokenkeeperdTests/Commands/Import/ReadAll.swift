import TokenLedger
import TokenModel

@testable import tokenkeeperd

/// What an import of a text does, without a database.
struct ImportedText {
    /// The rows for COPY, a line each.
    var rows: [String] = []
    /// The refused records: number and cause.
    var refused: [String] = []
    /// The file of the refused records.
    var rejects = ""
    var details: [String] = []
    /// What a person should see of the file and its rows.
    var coverage: [String] = []
    var position = ImportPosition(identity: "f")
    /// Why nothing after the position can be read.
    var problem: ImportProblem?

    static let now = Instant(microseconds: 1_800_000_000_000_000)
    /// 2026-01-01 00:00 UTC.
    static let asOf = Instant(microseconds: 1_767_225_600_000_000)

    /// - Parameters:
    ///   - arguments: The options of the command.
    ///   - piece: How many bytes are read at a time.
    ///   - token: How the database would read a token that is not plain hex.
    init(
        _ bytes: [UInt8], _ arguments: [String], piece: Int = 7, zone: LocalTime = .utc,
        token: (String) -> TokenReading = { .fault("token is '\($0.prefix(8))'... (9 characters): odd, expected hex") }
    ) throws {
        let options = try ImportOptions.parse(arguments)
        let rules = try options.rules(asOf: Self.asOf, now: Self.now, in: zone)
        var reader = ImportReader(try options.makeFormat(), rules, from: position)
        var read = 0
        var isLast = false
        while !isLast, problem == nil {
            var batch = try reader.next(
                sourceID: 7,
                { buffer, count in
                    let some = bytes[read..<min(read + piece, bytes.count, read + buffer.count - count)]
                    buffer.replaceSubrange(count..<(count + some.count), with: some)
                    count += some.count
                    read += some.count
                    return !some.isEmpty
                }, isStopped: { false })
            reader.resolve(&batch, batch.doubtful.map { token($0.token) })
            let records = reader.report(batch)
            if !records.isEmpty, rejects.isEmpty { rejects += String(decoding: reader.rejectsBegin, as: UTF8.self) }
            rejects += String(decoding: records, as: UTF8.self)
            rows += String(decoding: batch.copy.bytes, as: UTF8.self).split(separator: "\n").map(String.init)
            refused += batch.refused.map { "\($0.number) \($0.refusal.text)" }
            position = batch.position
            (isLast, problem) = (batch.isLast, batch.problem)
        }
        details = reader.summary.details
        coverage =
            reader.unread.lines + reader.summary.coverage(named: [], timeless: rules.timeless)
            + reader.summary.oddTopics
    }

    init(_ text: String, _ arguments: [String], piece: Int = 7) throws {
        try self.init(Array(text.utf8), arguments, piece: piece)
    }
}
