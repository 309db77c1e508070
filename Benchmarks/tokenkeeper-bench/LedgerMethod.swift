/// The text on how the drain and everything around the ledger is measured.
struct LedgerMethod {
    let scale: Scale

    var lines: [String] {
        [
            "- **The cluster** is private, made by `initdb` for the run, durable, and deleted afterwards. Autovacuum is off. This spares queues",
            "  that leave dead rows the cost of removing them, but leaves the dead entries in their indexes. A CHECKPOINT precedes each",
            "  measurement of drains, peers, sweeps, `register` and inserts; none happens during one.",
            "- **The ledger** has the stated number of active tokens of 32 bytes, in three topics, and a tenth more that have long been suppressed.",
            "  Bodies are JSON as Apple sends it. Each 410 concerns a different active token, spread over the whole ledger. For drains, peers and sweeps",
            "  each contestant of a round gets a fresh copy, in memory (of the large ledger: different slices of one copy); the gate, `register` and",
            "  inserts keep theirs.",
            "- **The backlog** is in one sealed partition of the queue, to which nobody writes any more. This is the daemon's fastest case, such as after an",
            "  hour's outage. \"The current partition\" is the other case: its rows are deleted by ranges of pages, and it is truncated when its time is over,",
            "  which is not in the figure. The ten million results of the memory measurement are too many for a bulk read, and are drained by ranges,",
            "  too. These measurements reuse one ledger, which already has the results that come over TLS, so those rates mean nothing.",
            "- **The floor** is the same durable change by bare SQL in one session of libpq: lock the partition; one statement that counts, upserts and",
            "  writes the history; TRUNCATE; COMMIT. The **bare bulk upsert** leaves out history and counts. These, the peers and the bare DELETE commit as the",
            "  daemon does, with `synchronous_commit` off in their transactions: a result that a crash restores to the queue is recorded again.",
            "- **The drain** is the real daemon, a release build in its own process, over the local socket. The time runs from the moment it is resumed",
            "  (SIGCONT; it was stopped while the backlog was written) until the last result is counted. Nothing else reads the queue meanwhile. The daemon uses",
            "  two connections for a backlog, and so two server processes, while the floor and the peers have one. The table of processor time shows what that",
            "  costs, and the rows with drain.second_connection=off show what it gains.",
            "- **The peers** record with the floor's own statement on the server, in one session, and with hardly any client work: no result is fetched, parsed",
            "  or sent. Each has the batch size at which it was fastest here, of \(scale.batches.map(String.init).joined(separator: ", ")), tried once on a quarter of",
            "  the results. The cost of PgQ's rotation and ticker is not counted. pgmq is an emulation: its read and delete, written out as SQL, one transaction each.",
            "- **A wrong ledger disqualifies**: after each round, the ledger, the history (except times and numbers) and the counts of floor, daemon and peers",
            "  are compared. A contestant that differs reaches no target.",
            "- **Freshness** is the time from the response to the INSERT of a 410 until `is_sendable` returns false, asked every half millisecond. Half load is",
            "  half of what one sender that queues a hundred rows per statement and one daemon sustain together.",
            "- **Hostile**: half of the backlog is in the current partition, half in a sealed one. \"A dump\" is pg_dump, started again and again, which takes a",
            "  core, and a session that holds a dump's locks throughout. Whether the drain slows down over time is measured in the current partition only, where",
            "  nothing is truncated meanwhile; 0.9 allows for noise.",
            "- **Metrics**: the backlog as for \"hostile\". The crowd asks for 1,000 scrapes a second, as far as it is served, and has slow readers, requests that do not",
            "  end, headers of ten megabytes, and more connections than the daemon takes. It runs beside the daemon and the server, which therefore have less",
            "  than two cores; processor time is compared, not rates. The daemon's is that of the threads of the drain: the listener has its own.",
            "- **The gate** is asked about tokens from the whole ledger; one in eleven is suppressed.",
            "- **Round trips** are prepared statements by libpq over the local socket, with `synchronous_commit` off on both sides, because otherwise the flush",
            "  would take most of the time.",
            "- **MB** are millions of bytes.",
            "",
            "This page claims nothing about other machines, other versions or a network; about the rates of the peers with clients or more sessions; or about",
            "a ledger that does not fit into memory.",
        ]
    }
}
