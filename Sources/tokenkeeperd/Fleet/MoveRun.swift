internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// What one run of `tokenkeeperd move` does for a topic: whatever comes next, by the map and by what both databases know.
struct MoveRun {
    private let move: TopicMove
    private let bucket: Int?
    private let map: TopicMap
    private let stop: ShutdownRequest
    private let bell = Wakeup()

    /// How long to wait before something is tried again.
    private static let pause: Duration = .milliseconds(250)

    /// - Parameter bucket: Nil if the topic moves alone.
    init(_ move: TopicMove, bucket: Int?, _ map: TopicMap, _ stop: ShutdownRequest) {
        (self.move, self.bucket, self.map, self.stop) = (move, bucket, map, stop)
        stop.alsoRing(bell)
    }

    /// Copies, or completes the move once the map leads to the target.
    ///
    /// - Returns: What has happened, and what is next.
    func advance(_ source: inout Connection, _ target: inout Connection) throws -> String {
        try refuse(try move.fault(on: &source))
        let movedTo = try TopicMove.movedTo(move.topic, on: &source)
        if let movedTo, movedTo != move.target {
            try refuse("\(move.topic) has moved from \(move.source) to \(movedTo), and that has not ended")
        }
        switch try TopicMove.movedTo(move.topic, on: &target) {
        case nil: break
        case move.source: try move.takeBack(on: &target)
        case let other?: try refuse("\(move.topic) has moved from \(move.target) to \(other), and that has not ended")
        }
        if movedTo == nil {
            if try !KnownTopics.all(on: &source).contains(move.topic) {
                try refuse("\(move.topic) is not known in \(move.source)")
            }
            // An earlier move has ended, and could not clean up.
            if try move.streams(isFinal: true, on: &target).contains(where: \.hasBegun) { try move.forget(on: &target) }
        }
        if movedTo == nil, map.holders(of: move.topic) != [move.target] {
            try move.copyPolicies(from: &source, to: &target)
            let tokens = try send(isFinal: false, &source, &target)
            let change =
                bucket.map { "bucket \($0) among those of \(move.target)" }
                ?? "\"\(move.topic)\": \"\(move.target)\" in its topics"
            return """
                \(move.topic): \(counted(tokens, "token is", "tokens are")) in \(move.target), too. Now change the map on every host \
                (\(change)), and run this again
                """
        }
        try wait(for: try move.begin(on: &source), on: &source)
        try move.copyPolicies(from: &source, to: &target)
        let tokens = try send(isFinal: true, &source, &target)
        while case let rows = try move.passOn(from: &source, to: &target), rows > 0 { try goOn() }
        let left = try move.leftBehind(on: &source)
        return """
            \(move.topic): \(move.target) has it now, with \(counted(tokens, "token", "tokens")) from \(move.source) and their history. \
            \(left.isEmpty ? "" : "\(move.source) still has \(left.joined(separator: ", ")). ")When nothing comes to \(move.source) any more, \
            end it: tokenkeeperd move \(bucket.map(String.init) ?? move.topic) --to \(move.target) --end
            """
    }

    /// Deletes the tokens from the source.
    func end(_ source: inout Connection, _ target: inout Connection) throws -> String {
        let streams = try move.streams(isFinal: true, on: &target)
        let left = try move.leftBehind(on: &source)
        if !left.isEmpty {
            try refuse(
                "\(move.topic): \(move.source) still has \(left.joined(separator: ", ")); a running daemon ends them, or an operator cancels campaigns and decides what is held"
            )
        }
        if !streams.allSatisfy(\.isComplete) {
            try refuse("\(move.topic) is not in \(move.target) yet: run this without --end")
        }
        var bar = ProgressBar(move.topic, items: "tokens", total: try move.tokens(on: &source))
        defer { bar.finish() }
        var deleted: Int64 = 0
        while case let some = try move.end(on: &source), some > 0 {
            deleted += some
            bar.advance(by: some)
            try goOn()
        }
        try move.forget(on: &target)
        return
            "\(move.topic): the move has ended, and \(counted(deleted, "token was", "tokens were")) deleted from \(move.source)"
    }

    /// Sends all tokens, from where an earlier run has stopped.
    ///
    /// - Returns: How many have come, in this run and before.
    private func send(isFinal: Bool, _ source: inout Connection, _ target: inout Connection) throws -> Int64 {
        let streams = try move.streams(isFinal: isFinal, on: &target)
        let before = streams.reduce(0) { $0 + $1.taken }
        var bar = ProgressBar(
            move.topic, items: "tokens", total: try move.tokens(on: &source), steps: before, count: before)
        defer { bar.finish() }
        var tokens: Int64 = 0
        for var stream in streams {
            while !stream.isComplete {
                if let some = try next(&stream, &source, &target) {
                    bar.advance(by: some)
                } else {
                    bar.wait(because: "waits for a lock in \(move.target)")
                    bell.wait(for: Self.pause)
                }
                try goOn()
            }
            tokens += stream.taken
        }
        return tokens
    }

    /// - Returns: How many tokens were sent; nil if another session holds one of them.
    private func next(
        _ stream: inout TopicMove.Stream, _ source: inout Connection, _ target: inout Connection
    ) throws(DatabaseError) -> Int64? {
        do {
            return try move.next(&stream, from: &source, to: &target)
        } catch {
            if error.remedy == .retry { return nil }
            throw error
        }
    }

    /// Waits for the transactions that began before the topic was marked.
    private func wait(for transaction: String, on source: inout Connection) throws {
        var bar = ProgressBar(move.topic, items: "tokens", total: nil)
        defer { bar.clear() }
        while !(try TopicMove.isNoticed(transaction, on: &source)) {
            bar.wait(because: "waits for transactions in \(move.source) that began before the topic had moved")
            bell.wait(for: Self.pause)
            try goOn()
        }
    }

    private func goOn() throws {
        guard stop.isAsked else { return }
        ConfigurationOptions.complain("stopped; run the same command to go on")
        throw ExitCode(ExitStatus.failed.rawValue)
    }

    private func refuse(_ fault: String?) throws {
        guard let fault else { return }
        ConfigurationOptions.complain(fault)
        throw ExitCode(ExitStatus.usage.rawValue)
    }
}
