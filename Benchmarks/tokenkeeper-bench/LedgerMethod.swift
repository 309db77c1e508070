/// How the drain and all that has to do with the ledger is measured, in words.
struct LedgerMethod {
    let scale: Scale

    var lines: [String] {
        [
            "- **The cluster** is private, made by `initdb` for the run, durable, and goes away with it. Autovacuum is off, which spares the queues that leave",
            "  dead rows the cost of clearing them away, and leaves the dead entries of their indexes where they are. Drains, peers, sweeps, `register` and",
            "  inserts are each preceded by a CHECKPOINT, and none falls within.",
            "- **The ledger** has so many active tokens of 32 bytes, in three topics, and a tenth more that have been dead for long. Bodies are JSON",
            "  as Apple sends it; each 410 is of another active token, all over the ledger. For drains, peers and sweeps each contestant of a round gets a fresh copy, in",
            "  memory (of the large ledger: slices of its own of one copy); gate, `register` and inserts go on with theirs.",
            "- **The backlog** lies in one sealed partition of the queue, where nobody writes any more: the daemon's fastest case, which a daemon that comes back after an",
            "  hour meets. \"The current partition\" is the other one: it is deleted by ranges of pages, and truncated when its time is over, which is not in the figure.",
            "  The ten million of the memory's measurement are more than is read whole at once, and go by ranges, too. These measurements go on with one ledger: what",
            "  the ones over TLS have to record is recorded already, so their rates say nothing.",
            "- **The floor** is the same durable change by bare SQL in one session of libpq: lock the partition, one statement that counts, upserts and",
            "  writes the history, TRUNCATE, COMMIT. The **bare bulk upsert** leaves out history and counts. These, the peers and the bare DELETE commit as the daemon does, with",
            "  synchronous_commit off in their transactions: a result that comes back after a crash is recorded again.",
            "- **The drain** is the real daemon as a process, a release build, over the local socket, from the moment it is let go (SIGCONT: it was stopped",
            "  while the backlog was laid before it) until the last result is counted. Nobody reads the queue meanwhile. It has two connections for",
            "  a backlog, and so two of the server's processes, where floor and peers have one: the table of processor time shows what that costs, and the",
            "  rows with drain.second_connection=off what it brings.",
            "- **The peers** record by the floor's own statement on the server, in one session, with no client work to speak of: no result is fetched, parsed or sent. Their batch",
            "  size is that at which each was the fastest here, of \(scale.batches.map(String.init).joined(separator: ", ")), tried once on a quarter of the results. PgQ's rotation and its ticker",
            "  are not charged. pgmq is an emulation: its read and delete, written out as SQL, a transaction each.",
            "- **A wrong ledger disqualifies**: after each round, ledger, history (but for times and numbers) and counts of floor, daemon and peers are compared; a figure of",
            "  one that differs has reached nothing.",
            "- **Freshness** is from the answer to the INSERT of a 410 until `is_sendable` says no, asked every half millisecond. Half load is half of what one",
            "  sender that queues a hundred in a statement and one daemon sustain together.",
            "- **Hostile**: half of the backlog in the current partition, half in a past one. \"A dump\" is pg_dump again and again, which takes a core, and a",
            "  session that holds a dump's locks throughout. Whether a run slows down as it goes on is looked at in the current partition alone, where nothing is truncated meanwhile; 0.9 allows for noise.",
            "- **The gate** is asked about tokens from all over the ledger, one in eleven of them dead.",
            "- **Round trips** are of prepared statements by libpq over the local socket, synchronous_commit off on both sides, since a flush would be most of them.",
            "- **MB** are millions of bytes.",
            "",
            "Not claimed: anything about other machines, other versions or a network between; that the peers, with clients or more sessions of their own, would reach",
            "what they reach here; how any of it behaves when the ledger does not fit into memory.",
        ]
    }
}
