extension Drain {
    /// What one pass over the queue has done.
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
        var bulkReads = 0
        /// How many times a lock of another session kept results in the queue. Locks of daemons that share the work do not count.
        public internal(set) var lockWaits = 0
        /// Results for which APNs blames the sender, by reason; they count as recorded, too.
        public private(set) var sendersFaults: [String: Int] = [:]

        /// What keeps results in the queue until a person acts: a missing privilege, a full disk. The drain continues with the
        /// rest.
        public internal(set) var trouble: DatabaseError?

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
            lockWaits += other.lockWaits
            trouble = other.trouble ?? trouble
            for (kind, count) in other.sendersFaults { blame(kind, count) }
        }

        /// Counts results for which APNs blames the sender.
        mutating func blame(_ kind: String, _ count: Int) {
            let known = sendersFaults[kind] != nil || sendersFaults.count < Self.maxKinds
            sendersFaults[known ? kind : "(other)", default: 0] += count
        }

        /// Results that have left their partition.
        public var taken: Int { accepted + recorded + rejected + putBack + held + movedToBacklog }

        /// Results that the daemon is done with, which excludes results moved to another partition.
        public var settled: Int { accepted + recorded + rejected + held }

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
        case batchSetAside(DatabaseError)
        /// PostgreSQL refused a row, which is now in `rejected_result`.
        case rowRejected(DatabaseError)
    }
}
