internal import TokenLedger

/// The rows of one transaction, and the records that were refused meanwhile.
struct ImportBatch {
    var copy = CopyText()
    var queued = 0
    var refused: [RefusedRecord] = []
    /// Rows whose token, or whose characters, the database has to read.
    var doubtful: [DoubtfulRow] = []
    /// Where the next batch begins.
    var position: ImportPosition
    /// Whether this is the end of the file.
    var isLast = false
    /// Why nothing after the batch can be read: the file is broken there.
    var problem: ImportProblem?

    struct RefusedRecord {
        let number: Int64
        let bytes: [UInt8]
        let refusal: Refusal
    }

    struct DoubtfulRow {
        let number: Int64
        let bytes: [UInt8]
        /// The row without its token.
        let row: [UInt8]
        let traits: ImportSummary.Traits
        let token: String

        var characters: String.UnicodeScalarView { (String(decoding: row, as: UTF8.self) + token).unicodeScalars }
    }

    /// The most records of a batch, and about the most bytes of its rows: it is kept in memory, and is one transaction.
    private static let mostRecords = 20_000
    private static let mostBytes = 4 << 20

    func isFull(since records: Int64) -> Bool {
        position.records - records >= Int64(Self.mostRecords) || copy.bytes.count >= Self.mostBytes
            || refused.count + doubtful.count >= Self.mostRecords
    }

    /// Refuses the doubtful rows that have a character which the database cannot hold.
    mutating func refuse(_ lacks: (DoubtfulRow) throws -> Unicode.Scalar?) rethrows {
        doubtful = try doubtful.filter { row in
            guard let scalar = try lacks(row) else { return true }
            let refusal = Refusal(
                "the database cannot hold a character", "U+\(String(scalar.value, radix: 16, uppercase: true))")
            refused.append(RefusedRecord(number: row.number, bytes: row.bytes, refusal: refusal))
            return false
        }
    }

    /// Adds the doubtful rows, as the database reads their tokens.
    mutating func resolve(_ readings: [TokenReading]) {
        for (row, reading) in zip(doubtful, readings) {
            switch reading {
            case .token(let hex):
                copy.raw(row.row)
                copy.plain(hex.utf8)
                copy.endRow()
                queued += 1
            case .fault(let fault):
                refused.append(
                    RefusedRecord(number: row.number, bytes: row.bytes, refusal: Self.refusal(fault, of: row.token)))
            }
        }
        doubtful = []
        refused.sort { $0.number < $1.number }
    }

    /// `token is 'abcdefgh'... (12 characters): a UUID, expected …`: what comes before the problem is this token's own.
    private static func refusal(_ fault: String, of token: String) -> Refusal {
        guard let end = fault.firstRange(of: "character") else {
            return Refusal(kind: "the token is no token", text: fault)
        }
        let problem = fault[end.upperBound...].drop { $0 != ")" }.dropFirst().prefix { $0 != "," }
        // With --token-form base64, what was expected names it.
        let hint =
            problem.isEmpty && !fault.contains("base64") && isBase64(token)
            ? "; it may be base64: see --token-form" : ""
        return Refusal(kind: "the token is no token\(problem)\(hint)", text: fault + hint)
    }

    private static let base64 = Set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_".utf8)

    /// Whether a text reads as 16 bytes or more in base64 or base64url.
    private static func isBase64(_ text: String) -> Bool {
        let digits = text.utf8.prefix { base64.contains($0) }
        let padding = text.utf8.dropFirst(digits.count)
        guard digits.count >= 22, digits.count % 4 != 1, padding.allSatisfy({ $0 == UInt8(ascii: "=") }) else {
            return false
        }
        return padding.isEmpty || text.utf8.count.isMultiple(of: 4)
    }
}
