/// What one transaction of a sweep adds to the counts of its run in `sweep_run`.
struct RunCounts {
    var prunedSuppressed: Int64 = 0
    var prunedDormant: Int64 = 0
    var refused: Int64 = 0
    var deletedEvents: Int64 = 0
    var deletedRejected: Int64 = 0
    var deletedHeld: Int64 = 0
    var deletedRuns: Int64 = 0
    var deletedSends: Int64 = 0
    var resetEvents: Int64 = 0
    var reapedTopics: Int64 = 0

    /// Adds the counts to the run and renews the lease, in the transaction that did the work.
    ///
    /// - Returns: False if the lease is lost. The transaction must then be rolled back.
    func add(to lease: SweepLease, on connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            """
            UPDATE tokenkeeper.sweep_run SET heartbeat_at = clock_timestamp(),
                pruned_suppressed = pruned_suppressed + $3, pruned_dormant = pruned_dormant + $4, refused = refused + $5,
                deleted_events = deleted_events + $6, deleted_rejected = deleted_rejected + $7, deleted_held = deleted_held + $8,
                deleted_runs = deleted_runs + $9, deleted_sends = deleted_sends + $10,
                reset_events = reset_events + $11, reaped_topics = reaped_topics + $12
            WHERE run_id = $1 AND outcome = 'running' AND daemon_id = $2
            """,
            [
                .int8(lease.runID), .text(lease.holder), .int8(prunedSuppressed), .int8(prunedDormant), .int8(refused),
                .int8(deletedEvents), .int8(deletedRejected), .int8(deletedHeld), .int8(deletedRuns),
                .int8(deletedSends), .int8(resetEvents), .int8(reapedTopics),
            ]
        ).affected == 1
    }
}
