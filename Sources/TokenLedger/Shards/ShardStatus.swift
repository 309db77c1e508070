internal import TokenModel

/// The state of one shard, as a daemon of another shard reads it.
public struct ShardStatus: Sendable {
    /// From the view `status` of the shard.
    public struct Counts: Equatable, Sendable {
        /// What a person should look at, in words, the critical ones first.
        public var warnings: [String] = []
        /// How many of them are critical.
        public var critical = 0
        /// Results in the queue; nil if no daemon ever ran.
        public var queueDepth: Int64?
        public var isQueueEstimated = false
        /// How long the oldest result has been waiting; nil if there is none.
        public var oldestResultAge: Duration?
        /// Here and in the next three, 10,000 means 10,000 or more, and nil that another session has locked a table against reading.
        public var rejected: Int64?
        public var held: Int64?
        public var requests: Int64?
        public var failedSends: Int64?
        /// Active tokens, as they were last counted; nil as above, and before the first count.
        public var active: Int64?
        /// Tokens in all other states.
        public var suppressed: Int64?
        public var liveDaemons: Int64 = 0

        public init() {}
    }

    public let number: Int
    /// Why the shard did not answer, in words; otherwise what it says.
    public let answer: Answer

    public enum Answer: Equatable, Sendable {
        case counts(Counts)
        case missing(because: String)
    }

    public init(number: Int, answer: Answer) {
        self.number = number
        self.answer = answer
    }
}

extension ShardStatus {
    /// Asks a shard, over a connection that is closed afterwards. A server that is gone without a word takes ten seconds, unless the map has
    /// another `connect_timeout`; one that hangs takes fifteen.
    ///
    /// - Parameter own: How this daemon connects to its own database: as the same user, and with the same password file.
    public init(_ number: Int, in map: ShardMap, as own: DatabaseAddress) {
        do throws(DatabaseError) {
            var connection = try Connection(
                to: try map.address(of: number, as: own), writes: false,
                patience: .init(usual: .seconds(15), stoppable: .seconds(15)), waiting: { _, _ in })
            if let own = try OwnShard(on: &connection), own.number != number || own.count != map.count {
                let (found, meant) = ("\(own.number) of \(own.count.number)", "\(number) of \(map.count.number)")
                self.init(
                    number: number, answer: .missing(because: "it is shard \(found), and shards.map says \(meant)"))
                return
            }
            self.init(number: number, answer: .counts(try Counts(on: &connection)))
        } catch {
            let words = error.description.split(whereSeparator: \.isWhitespace).joined(separator: " ")
            self.init(number: number, answer: .missing(because: words))
        }
    }
}

extension ShardStatus.Counts {
    fileprivate init(on connection: inout Connection) throws(DatabaseError) {
        let transaction = BatchTransaction(
            mode: .snapshot, lockTimeout: .milliseconds(100), statementTimeout: .seconds(5))
        self = try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT s.warnings, cardinality(s.critical_warnings), s.queue_depth, coalesce(s.queue_depth_estimated, false),
                       (extract(epoch FROM s.oldest_result_age) * 1000000)::bigint, s.rejected, s.held, s.requests, s.failed_sends,
                       CASE WHEN s.tokens_as_of IS NOT NULL THEN s.tokens_active END,
                       CASE WHEN s.tokens_as_of IS NOT NULL
                            THEN s.tokens_stale + s.tokens_suspect + s.tokens_superseded + s.tokens_unregistered_by_app END,
                       s.live_daemons
                FROM tokenkeeper.status AS s
                """, []
            ).one { row throws(DatabaseError) in
                var counts = Self()
                counts.warnings = try row.read()
                counts.critical = try row.read()
                counts.queueDepth = try row.read()
                counts.isQueueEstimated = try row.read()
                counts.oldestResultAge = try row.read(Int64?.self).map { .microseconds($0) }
                counts.rejected = try row.read()
                counts.held = try row.read()
                counts.requests = try row.read()
                counts.failedSends = try row.read()
                counts.active = try row.read()
                counts.suppressed = try row.read()
                counts.liveDaemons = try row.read()
                return counts
            }
        }
    }
}
