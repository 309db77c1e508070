/// Another kind of queue on the same work, which ends in the same ledger: by the floor's own statement on the server, so a
/// peer has no client work at all.
protocol Peer {
    init(workload: Workload, batch: Int)
    var name: String { get }
    var batch: Int { get }
    /// How many times as fast the daemon shall be.
    var target: Double { get }
    var workload: Workload { get }

    /// Makes the queue and fills it.
    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws
    /// Drains one batch.
    ///
    /// - Returns: How many results that were.
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
