internal import ArgumentParser
internal import TokenLedger

/// Searches of `explain`, on one database or on the shards of a router that can have what is searched.
struct ShardedLookup {
    private let configuration: Configuration
    private static let role = "tokenkeeper_reader"

    init(_ configuration: Configuration) {
        self.configuration = configuration
    }

    /// - Returns: What was found, nil if no shard has answered; and the exit status, if one has not.
    func answer(
        _ search: TokenLookup, asJSON: Bool
    ) throws -> (answer: TokenLookup.Answer?, json: String?, failure: ExitCode?) {
        var answers: [TokenLookup.Answer] = []
        var objects: [(of: TokenHistory, json: String)] = []
        let failure = try onEach { routed in
            if case .token(let digits) = search.subject { routed.numbers(of: digits) } else { Array(routed.numbers) }
        } work: { connection in
            let answer = try search.answer(on: &connection)
            answers.append(answer)
            if asJSON, case .histories(let histories) = answer {
                for history in histories {
                    let array = try HistoryJSON.array(of: [history], on: &connection)
                    objects.append((history, String(array.dropFirst().dropLast())))
                }
            }
            return !search.hasWhole(in: answer)
        }
        if answers.isEmpty { return (nil, nil, failure) }
        objects.sort { TokenHistory.precedes($0.of, $1.of) }
        let json = asJSON ? "[" + objects.map(\.json).joined(separator: ", ") + "]" : nil
        return (search.merged(answers), json, failure)
    }

    func answer(_ search: TaggedTokens) throws -> (answer: TaggedTokens.Answer?, failure: ExitCode?) {
        var answers: [TaggedTokens.Answer] = []
        let failure = try onEach {
            Array($0.numbers)
        } work: { connection in
            answers.append(try search.answer(on: &connection))
            return true
        }
        return (answers.isEmpty ? nil : .merged(answers), failure)
    }

    /// - Parameters:
    ///   - shards: Those to ask, in this order.
    ///   - work: Returns whether to go on with the next shard.
    /// - Returns: The exit status, if a shard does not answer.
    private func onEach(
        _ shards: (RoutedShards) -> [Int], work: (inout Connection) throws -> Bool
    ) throws -> ExitCode? {
        var routed: RoutedShards?
        try configuration.withConnection(writes: false, as: Self.role) { connection in
            routed = try RoutedShards(of: &connection, at: configuration.address)
            if routed != nil { return }
            try Migrator(daemon: Daemon.version).check(&connection)
            _ = try work(&connection)
        }
        guard let routed else { return nil }
        var (failure, goesOn) = (ExitCode?.none, true)
        for number in shards(routed) where goesOn {
            do {
                try configuration.withShard(number, of: routed, writes: false, as: Self.role) { connection in
                    goesOn = try work(&connection)
                }
            } catch let code as ExitCode {
                failure = code
            }
        }
        return failure
    }
}
