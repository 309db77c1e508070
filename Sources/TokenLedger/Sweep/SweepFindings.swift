/// What a sweep reports at its end, apart from its counts.
struct SweepFindings {
    /// Topics that are over their limit, in words.
    var refusals: [String] = []
    /// What failed, in words.
    private(set) var failures: [String] = []
    private var moreFailures = 0
    /// Whether a failure was a lock of another session.
    private(set) var hasMetLock = false

    /// Failures beyond this number are only counted.
    private static let maxFailures = 10

    mutating func failed(_ what: String, _ error: DatabaseError) {
        if error.sqlState == "55P03" { hasMetLock = true }
        if failures.count < Self.maxFailures { failures.append("\(what): \(error)") } else { moreFailures += 1 }
    }

    var message: String? {
        var messages = failures + (moreFailures > 0 ? ["\(moreFailures) more failed"] : [])
        if !refusals.isEmpty { messages.append("refused: " + refusals.joined(separator: "; ")) }
        return messages.isEmpty ? nil : messages.joined(separator: "; ")
    }
}
