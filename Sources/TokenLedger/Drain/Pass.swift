extension Drain {
    /// What one pass over the queues has done: the results first.
    public struct Pass: Equatable, Sendable {
        public var accepted = 0
        public var recorded = 0
        public var rejected = 0
        /// Rejected results that were only counted: the last hour had more than may be kept.
        public var notKept = 0
        public var putBack = 0
        /// Suspects that the mass-failure guard holds; an operator decides about them.
        public var held = 0
        /// Results that bulk reads have moved to the backlog.
        var movedToBacklog = 0
        /// Partitions that were read in bulk.
        public internal(set) var bulkReads = 0
        public var registrations = Registrations()
        /// How many times a lock of another session kept rows in a queue. Locks of daemons that share the work do not count.
        public internal(set) var lockWaits = 0
        /// Results for which APNs blames the sender, by reason; they count as recorded, too.
        public private(set) var sendersFaults: [String: Int] = [:]

        /// What keeps rows in a queue until a person acts: a missing privilege, a full disk. The drain continues with the
        /// rest.
        public private(set) var troubles: [QueueName: DatabaseError] = [:]

        /// What PostgreSQL says about rows that it refuses, though it takes others. They wait in the retry partition.
        public internal(set) var refusals: [QueueName: Refusal] = [:]

        public struct Refusal: Equatable, Sendable {
            public var rows: Int
            public var error: DatabaseError
        }

        /// The trouble of either queue.
        public var trouble: DatabaseError? { troubles[.results] ?? troubles[.registrations] }

        /// Apple has fewer reasons than this. The rest counts as one, so that no log line grows without bound.
        private static let maxKinds = 40

        public init() {}

        public mutating func add(_ other: Pass) {
            accepted += other.accepted
            recorded += other.recorded
            rejected += other.rejected
            notKept += other.notKept
            putBack += other.putBack
            held += other.held
            movedToBacklog += other.movedToBacklog
            bulkReads += other.bulkReads
            registrations.add(other.registrations)
            lockWaits += other.lockWaits
            troubles.merge(other.troubles) { _, new in new }
            refusals.merge(other.refusals) { _, new in new }
            for (kind, count) in other.sendersFaults { blame(kind, count) }
        }

        mutating func note(_ trouble: DatabaseError, of queue: QueueName) { troubles[queue] = trouble }

        /// Notes what has ended the pass: it keeps the rows of both queues.
        public mutating func ended(by trouble: DatabaseError) {
            for queue in QueueName.allCases { note(trouble, of: queue) }
        }

        /// Counts results for which APNs blames the sender.
        mutating func blame(_ kind: String, _ count: Int) {
            let known = sendersFaults[kind] != nil || sendersFaults.count < Self.maxKinds
            sendersFaults[known ? kind : "(other)", default: 0] += count
        }

        /// Rows that have left their partition.
        public var taken: Int {
            accepted + recorded + rejected + putBack + held + movedToBacklog + registrations.taken
        }

        /// Results that the daemon is done with, which excludes results moved to another partition.
        public var settledResults: Int { accepted + recorded + rejected + held }

        /// Rows of both queues that the daemon is done with.
        public var settled: Int { settledResults + registrations.settled }

        /// Whether any row has left its partition. If so, look again soon.
        public var moved: Bool { taken + bulkReads > 0 }
    }

    /// What happened to a row or a batch. The pass continues.
    public enum Incident: Sendable {
        /// A batch or a bulk read is committed. It has counted these results, and took this long from its BEGIN.
        case committed([ResultCount], took: Duration)
        /// The mass-failure guard of a topic has tripped or reset.
        case guardChanged(GuardTransition)
        /// A partition could not be read in bulk, and is drained in batches.
        case bulkReadFailed(DatabaseError)
        /// PostgreSQL refused the data of a batch. Its rows moved to the retry partition and are tried one by one.
        case batchSetAside(QueueName, DatabaseError)
        /// PostgreSQL refused a row, though it takes others. The row stays in the retry partition, and is tried again later.
        case rowRefused(QueueName, DatabaseError)
    }
}

extension Drain.Pass {
    /// What a pass has done with registrations and logouts.
    public struct Registrations: Equatable, Sendable {
        public var applied = 0
        public var rejected = 0
        /// Rejected registrations that were only counted: the last hour had more than may be kept.
        public var notKept = 0
        /// Logouts from a source that the mass-failure guard holds; an operator decides about them.
        public var held = 0
        /// Moved to the retry partition.
        public var putBack = 0

        public init(applied: Int = 0, rejected: Int = 0, notKept: Int = 0, held: Int = 0, putBack: Int = 0) {
            (self.applied, self.rejected, self.notKept) = (applied, rejected, notKept)
            (self.held, self.putBack) = (held, putBack)
        }

        mutating func add(_ other: Self) {
            applied += other.applied
            rejected += other.rejected
            notKept += other.notKept
            held += other.held
            putBack += other.putBack
        }

        /// Rows that have left their partition.
        public var taken: Int { applied + rejected + held + putBack }

        /// Rows that the daemon is done with.
        public var settled: Int { applied + rejected + held }
    }
}
