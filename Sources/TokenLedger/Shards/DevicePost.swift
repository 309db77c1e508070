internal import TokenModel

/// Delivers messages about devices to the other shards: which token of a device was registered last. See docs/decisions/shards.md.
///
/// A message stays in the database until the other shard has acknowledged it. Each is a state with a version, so it does no harm if two daemons deliver it,
/// or one of them twice.
public struct DevicePost {
    /// A shard that messages go to. It may be this one: its home is then the same database, over a connection of its own.
    private final class Link {
        let number: Int
        var connection: Connection?
        var usedAt = ContinuousClock.now
        var backoff = Backoff(from: .seconds(1), to: .seconds(60))
        /// After a failure, not before this.
        var retryAt: ContinuousClock.Instant?
        /// Devices in the order of their digests, in hex: the next round goes on after this one. What is busy comes again in the round after.
        var after = ""

        init(_ number: Int) {
            self.number = number
        }
    }

    /// What happened in a round, for the log.
    public struct Round: Sendable {
        /// How many messages were acknowledged.
        public var delivered: Int64 = 0
        /// How many messages shards had to leave for later, because an application had locked the device or one of its tokens.
        public var busy: Int64 = 0
        /// Shards that could not be reached or refused the messages, and why.
        public var failures: [(shard: Int, error: DatabaseError)] = []
        /// Shards that had failed before and have acknowledged messages now.
        public var recovered: [Int] = []
    }

    private let map: ShardMap
    private let own: DatabaseAddress
    private let links: [Link]
    private var cleanedAt: ContinuousClock.Instant?

    /// A connection that has not been used for this long is closed.
    private static let keptFor: Duration = .seconds(60)
    /// A message for a device that is gone may be under way for this long: a silent connection is closed within minutes.
    private static let remembersFor = "1 day"
    /// Messages in a transaction: the receiving shard holds as many devices for some hundred milliseconds.
    private static let batch: Int32 = 200

    /// - Parameter own: How this daemon connects to its own database. It connects to the others as the same user, with the same password file.
    public init(_ map: ShardMap, own: DatabaseAddress) {
        self.map = map
        self.own = own
        links = (0..<map.count.number).map(Link.init)
    }

    /// Delivers what is due, a batch to each shard.
    ///
    /// - Parameter waiting: Called while another shard is waited for; see `Connection`.
    /// - Returns: Nil if this database is not a shard.
    /// - Throws: Errors of this database only.
    public mutating func round(
        on connection: inout Connection, waiting: @escaping @Sendable (Duration, Duration) -> Void
    ) throws(DatabaseError) -> Round? {
        let transaction = BatchTransaction(lockTimeout: .milliseconds(100))
        guard let shards = try Self.shards(on: &connection) else { return nil }
        guard shards == map.count.number else {
            throw DatabaseError(
                .configuration, "this database is one of \(shards) shards, and shards.map has \(map.count.number)")
        }
        let needsCleaning = cleanedAt.map { $0.duration(to: .now) > .seconds(3600) } ?? true
        let due = try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.run("SELECT tokenkeeper.check_next_devices()")
            if needsCleaning {
                try connection.run(
                    "SELECT tokenkeeper.delete_gone_devices(clock_timestamp() - interval '\(Self.remembersFor)')")
            }
            return try connection.query("SELECT n FROM tokenkeeper.device_message_targets() AS n", []).decode {
                row throws(DatabaseError) in Int(try row.read(Int32.self))
            }
        }
        if needsCleaning { cleanedAt = .now }
        var round = Round()
        for link in links {
            if due.contains(link.number), link.retryAt.map({ $0 <= .now }) ?? true {
                try deliver(over: link, &round, on: &connection, waiting)
            } else if link.usedAt.duration(to: .now) > Self.keptFor {
                link.connection = nil
            }
        }
        return round
    }

    /// How many shards there are; nil if this database is not one.
    private static func shards(on connection: inout Connection) throws(DatabaseError) -> Int? {
        try connection.query("SELECT s.shards FROM tokenkeeper.shard AS s", []).decode {
            row throws(DatabaseError) in Int(try row.read(Int32.self))
        }.first
    }

    private func deliver(
        over link: Link, _ round: inout Round, on connection: inout Connection,
        _ waiting: @escaping @Sendable (Duration, Duration) -> Void
    ) throws(DatabaseError) {
        let transaction = BatchTransaction(lockTimeout: .milliseconds(100))
        let package = try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT p::text, (SELECT substr(max(m ->> 'device_digest'), 3) FROM jsonb_array_elements(p -> 'messages') AS m),
                       jsonb_array_length(p -> 'messages')::bigint
                FROM tokenkeeper.device_messages($1, decode($2, 'hex'), $3) AS p
                """,
                [.int4(Int32(link.number)), .text(link.after), .int4(Self.batch)]
            ).one { row throws(DatabaseError) in
                (
                    messages: try row.read(String?.self), last: try row.read(String?.self),
                    count: try row.read(Int64?.self) ?? 0
                )
            }
        }
        guard let messages = package.messages else {
            link.after = ""
            return
        }
        let receipts: String
        do throws(DatabaseError) {
            receipts = try receive(messages, link, waiting)
        } catch {
            link.connection = nil
            link.retryAt = .now + link.backoff.next().jittered()
            round.failures.append((link.number, error))
            return
        }
        let acknowledged = try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.acknowledge_device_messages($1::text::jsonb)", [.text(receipts)]
            ).value(Int64.self)
        }
        if link.retryAt != nil { round.recovered.append(link.number) }
        link.retryAt = nil
        link.backoff.reset()
        link.after = package.last ?? ""
        round.delivered += acknowledged
        round.busy += max(package.count - acknowledged, 0)
    }

    /// The shard has committed, and flushed, what it returns receipts for.
    private func receive(
        _ messages: String, _ link: Link, _ waiting: @escaping @Sendable (Duration, Duration) -> Void
    ) throws(DatabaseError) -> String {
        if link.connection == nil {
            link.connection = try Connection(to: try map.address(of: link.number, as: own), waiting: waiting)
        }
        defer { link.usedAt = .now }
        return try Self.receive(messages, on: &link.connection!)
    }

    private static func receive(
        _ messages: String, on connection: inout Connection
    ) throws(DatabaseError) -> String {
        let transaction = BatchTransaction(lockTimeout: .milliseconds(100), isDurable: true)
        return try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.receive_device_messages($1::text::jsonb)::text", [.text(messages)]
            ).value(String.self)
        }
    }
}
