/// Another kind of queue for the same work, with the same final ledger. It records with the floor's own statement on the server,
/// so a peer has almost no client work.
protocol Peer {
    init(workload: Workload, batch: Int)
    var name: String { get }
    var batch: Int { get }
    /// The target: how many times as fast the daemon should be.
    var target: Double { get }
    var workload: Workload { get }

    /// Makes the queue and fills it.
    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws
    /// Drains one batch.
    ///
    /// - Returns: How many results the batch had.
    func step(on session: Session) throws -> Int
}

extension Peer {
    func drain(_ positions: Range<Int>, deadEvery: Int, on database: Database) throws -> Sample {
        try prepare(positions, deadEvery: deadEvery, on: database.session())
        let session = try database.session()
        try session.run("CHECKPOINT")
        let stopwatch = try Stopwatch(database.cluster)
        var left = positions.count
        while left > 0 {
            let taken = try step(on: session)
            guard taken > 0 else { break }
            left -= taken
        }
        return try stopwatch.sample(rows: positions.count)
    }
}
