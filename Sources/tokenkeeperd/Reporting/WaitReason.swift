internal import TokenLedger
internal import TokenModel

/// Why rows wait in a queue, in words for the log, `Status:` and the view `status`. Pure.
struct WaitReason {
    /// What a person must fix.
    var trouble: DatabaseError?
    /// Rows that PostgreSQL refuses, though it takes others.
    var refusal: Drain.Pass.Refusal?
    /// Sessions whose locks are in the way; empty if they are not known. Nil if no lock is.
    var holders: [LockHolder]?
    /// How many of its rows the drain is done with, of those in the last `period`.
    var settled = 0
    var period: Duration = .zero

    /// - Returns: What follows "because"; nil if no row waits.
    func words(for queue: Heartbeat.Queue) -> String? {
        if queue.depth == 0 && queue.exact { return nil }
        if let trouble { return "PostgreSQL reports: \(trouble)" }
        if let refusal {
            return
                "PostgreSQL refuses \(counted(refusal.rows, "row", "rows")) and takes others; each is tried again, later each time: "
                + "\(refusal.error)"
        }
        if let holders { return "of a lock in PostgreSQL: \(holders.words)" }
        let seconds = period / .seconds(1)
        let retries =
            queue.retries == 0 ? nil : counted(queue.retries, "of them waits", "of them wait") + " for another attempt"
        guard settled > 0, seconds > 0 else {
            if seconds < 1 { return retries }
            return retries ?? "the daemon has recorded none of them within the last \(Int(seconds.rounded())) s"
        }
        let drains = "the daemon is draining them, at least \(max(1, Int(Double(settled) / seconds))) a second"
        return [drains, retries].compactMap { $0 }.joined(separator: "; ")
    }
}
