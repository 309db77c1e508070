/// The same durable change by bare SQL in one session: a whole sealed partition in one statement, and its TRUNCATE.
struct Floor {
    let workload: Workload
    /// False for the ledger alone, by a bulk upsert.
    var records = true

    /// - Parameter positions: The results to record on a database that has none queued.
    func drain(_ positions: Range<Int>, deadEvery: Int, on database: Database) throws -> Sample {
        let session = try database.session()
        let partition = try Partition.past(session)
        try workload.queue(positions, deadEvery: deadEvery, in: partition, on: session)
        try session.run("CHECKPOINT")
        let stopwatch = try Stopwatch(database.cluster)
        try session.run(Recording.begin)
        try session.run("LOCK TABLE \(partition.table) IN ACCESS EXCLUSIVE MODE")
        try session.run(records ? Recording.statement(from: partition.table) : Recording.upsert(from: partition.table))
        try session.run("TRUNCATE \(partition.table)")
        try session.run("COMMIT")
        return try stopwatch.sample(rows: positions.count)
    }
}
