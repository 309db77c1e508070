internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// An import into all shards of a router: the file is read once for each shard, which takes its own rows. So each shard notes how far its import has
/// come, as one database does.
struct RoutedImport {
    let configuration: Configuration
    let routed: RoutedShards
    /// The group roles whose rights it needs.
    let role: String

    /// Imports into one shard after the other, and ends early if one is interrupted. The same import then continues with that shard.
    ///
    /// - Parameter run: The import into one shard.
    /// - Returns: What has happened on each shard that has ended, and the exit status if one has failed.
    func perform(
        _ input: borrowing ImportInput, restart: Bool, _ run: (ImportShard) -> ImportRun
    ) throws -> (outcomes: [ImportOutcome], failure: ExitCode?) {
        guard input.isFile else {
            throw ImportProblem(
                "\(input.path) can be read only once, and on a router the file is read once for each shard: write it to a file first"
            )
        }
        let shards = routed.numbers.map { ImportShard(number: $0, count: routed.count, isRouted: true) }
        // All must answer before any takes a row.
        var finished: [Int] = []
        for shard in shards {
            try on(shard) { connection in
                let run = run(shard)
                try ImportSource.checkRights(run.queue, on: &connection)
                let identity = run.identity(of: input)
                finished.append(
                    try ImportSource.finished(input.name, on: &connection).count {
                        ImportPosition($0)?.identity == identity
                    })
            }
        }
        // A shard that has finished this import once more than another is ahead of it.
        let least = finished.min() ?? 0
        var outcomes: [ImportOutcome] = []
        for (shard, times) in zip(shards, finished) where restart || times == least {
            try input.seek(to: 0)
            do {
                try on(shard) { connection in
                    outcomes.append(try run(shard).perform(input, restart: restart, on: &connection))
                }
            } catch let failure as ExitCode {
                return (outcomes, failure)
            }
            if let last = outcomes.last, !last.isFinished, last.problem == nil { break }
        }
        return (outcomes, nil)
    }

    private func on(_ shard: ImportShard, _ work: (inout Connection) throws -> Void) throws {
        var problem: ImportProblem?
        try configuration.withShard(shard.number, of: routed, writes: true, as: role) { connection in
            do {
                try work(&connection)
            } catch let error as ImportProblem {
                problem = error
            }
        }
        if let problem { throw problem }
    }
}
