/// How the drain and all that has to do with the ledger is measured, in words.
struct LedgerMethod {
    let scale: Scale

    var lines: [String] {
        [
            "- **The cluster** is private, made by `initdb` for the run, durable, and deleted afterwards. Autovacuum is off. This spares the queues that",
            "  leave dead rows the cost of clearing them away, and leaves the dead entries of their indexes in place. A CHECKPOINT precedes each",
            "  measurement of drains, peers, sweeps, `register` and inserts; none happens during one.",
            "- **The ledger** has the stated number of active tokens of 32 bytes, in three topics, and a tenth more that have been suppressed for long.",
            "  Bodies are JSON as Apple sends it. Each 410 concerns a different active token, spread over the whole ledger. For drains, peers and sweeps",
            "  each contestant of a round gets a fresh copy, in memory (of the large ledger: different slices of one copy); the gate, `register` and",
            "  inserts keep theirs.",
            "- **The backlog** lies in one sealed partition of the queue, to which nobody writes any more: the daemon's fastest case, which a daemon meets that",
            "  comes back after an hour. \"The current partition\" is the other case: it is deleted by ranges of pages, and truncated when its time is over,",
            "  which is not in the figure. The ten million results of the memory measurement are more than is read whole at once, and are drained by ranges",
            "  too. These measurements reuse one ledger: what the ones over TLS have to record is recorded already, so their rates say nothing.",
            "- **The floor** is the same durable change by bare SQL in one session of libpq: lock the partition; one statement that counts, upserts and",
            "  writes the history; TRUNCATE; COMMIT. The **bare bulk upsert** leaves out history and counts. These, the peers and the bare DELETE commit as the",
            "  daemon does, with `synchronous_commit` off in their transactions: a result that comes back after a crash is recorded again.",
            "- **The drain** is the real daemon, a release build in its own process, over the local socket. The time runs from the moment it is resumed",
            "  (SIGCONT; it was stopped while the backlog was written) until the last result is counted. Nobody reads the queue meanwhile. It uses two",
            "  connections for a backlog, and so two of the server's processes, where floor and peers have one. The table of processor time shows what that",
            "  costs, and the rows with drain.second_connection=off show what it gains.",
            "- **The peers** record with the floor's own statement on the server, in one session, and with hardly any client work: no result is fetched, parsed",
            "  or sent. Each has the batch size at which it was fastest here, of \(scale.batches.map(String.init).joined(separator: ", ")), tried once on a quarter of",
            "  the results. PgQ's rotation and its ticker are not charged. pgmq is an emulation: its read and delete, written out as SQL, one transaction each.",
            "- **A wrong ledger disqualifies**: after each round, the ledger, the history (except times and numbers) and the counts of floor, daemon and peers",
            "  are compared. A contestant that differs has not reached any target.",
            "- **Freshness** is the time from the response to the INSERT of a 410 until `is_sendable` returns false, asked every half millisecond. Half load is",
            "  half of what one sender that queues a hundred rows per statement and one daemon sustain together.",
            "- **Hostile**: half of the backlog is in the current partition, half in a sealed one. \"A dump\" is pg_dump, started again and again, which takes a",
            "  core, and a session that holds a dump's locks throughout. Whether a run slows down as it goes on is measured in the current partition only, where",
            "  nothing is truncated meanwhile; 0.9 allows for noise.",
            "- **The gate** is asked about tokens from the whole ledger; one in eleven is suppressed.",
            "- **Round trips** are those of prepared statements by libpq over the local socket, with `synchronous_commit` off on both sides, because a flush would",
            "  be most of the time.",
            "- **MB** are millions of bytes.",
            "",
            "Not claimed: anything about other machines, other versions or a network in between; that the peers, with clients or more sessions of their own,",
            "would reach what they reach here; how any of it behaves when the ledger does not fit into memory.",
        ]
    }
}
