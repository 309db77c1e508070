internal import Logging
internal import TokenLedger

/// Passes on what reaches this database after its topic has moved to another one.
struct MovedRows {
    private var again = ContinuousClock.now
    private var complainedAt: ContinuousClock.Instant?

    /// How long the other database may be silent: the chores of this one wait meanwhile.
    private static let silence: Duration = .seconds(10)
    private static let pauseAfterFailure: Duration = .seconds(60)
    private static let complainsEvery: Duration = .seconds(600)

    mutating func passOn(
        from connection: inout Connection, _ configuration: Configuration, every pause: Duration, _ logger: Logger
    ) throws(DatabaseError) {
        if ContinuousClock.now < again { return }
        again = .now + pause
        let topics = try TopicMove.withLateRows(on: &connection)
        if topics.isEmpty { return }
        guard let name = configuration.values["map.database"]?.value, let map = try? TopicMap(of: configuration) else {
            return complain("there is no map: set map.file and map.database", topics[0], logger)
        }
        for topic in topics {
            // The map of now: the topic may have moved further. A topic that is split has not moved.
            guard case .to(let target) = map.database(of: topic), target != name, let text = map.databases[target]
            else {
                complain("the map leads to this database, or to none", topic, logger)
                continue
            }
            var rows = 0
            do {
                var other = try Connection(to: try Self.address(text), silence: Self.silence)
                let move = TopicMove(topic, from: name, to: target)
                while case let some = try move.passOn(from: &connection, to: &other), some > 0 { rows += some }
            } catch {
                // The chores of this database have their turn before the next attempt.
                again = .now + Self.pauseAfterFailure
                complain("\(target): \(error)", topic, logger)
                return
            }
            if rows > 0 {
                logger.info(
                    "passed on what reached this database after its topic had moved",
                    metadata: ["topic": "\(topic)", "rows": "\(rows)", "to": "\(target)"])
            }
        }
    }

    private static func address(_ text: String) throws(DatabaseError) -> DatabaseAddress {
        do { return try DatabaseAddress(text) } catch { throw DatabaseError(.connection, "\(error)") }
    }

    private mutating func complain(_ error: String, _ topic: String, _ logger: Logger) {
        if let last = complainedAt, last.duration(to: .now) < Self.complainsEvery { return }
        complainedAt = .now
        logger.warning(
            "rows of a topic that has moved wait to be passed on", metadata: ["topic": "\(topic)", "error": "\(error)"])
    }
}
