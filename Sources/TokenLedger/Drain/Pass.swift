extension Drain {
    /// What one pass over the queue has done.
    public struct Pass: Equatable, Sendable {
        public var accepted = 0
        public var recorded = 0
        public var rejected = 0
        /// Of the rejected results, those that were counted only: the last hour had more than may be kept.
        public var notKept = 0
        public var putBack = 0
        /// Suspects that the mass-failure guard holds; an operator decides.
        public var held = 0
        /// Results taken out of a sealed partition that are in the backlog now.
        var takenOut = 0
        /// Sealed partitions that were read whole.
        var partitionsTaken = 0
        /// How many times a lock of another session kept results in the queue. Not those of daemons that share the work.
        public internal(set) var lockWaits = 0
        /// Results of which APNs blames the sender, by reason; they count as recorded too.
        public private(set) var sendersFaults: [String: Int] = [:]

        /// What keeps results in the queue until a person acts: lacking rights, a full disk. The rest goes on meanwhile.
        public internal(set) var trouble: DatabaseError?

        /// More kinds than Apple has are not Apple's: the rest counts as one, so that no log line grows with them.
        private static let mostKinds = 40

        public init() {}

        public mutating func add(_ other: Pass) {
            accepted += other.accepted
            recorded += other.recorded
            rejected += other.rejected
            notKept += other.notKept
            putBack += other.putBack
            held += other.held
            takenOut += other.takenOut
            partitionsTaken += other.partitionsTaken
            lockWaits += other.lockWaits
            trouble = other.trouble ?? trouble
            for (kind, count) in other.sendersFaults { blame(kind, count) }
        }

        /// Counts results of which APNs blames the sender.
        mutating func blame(_ kind: String, _ count: Int) {
            let known = sendersFaults[kind] != nil || sendersFaults.count < Self.mostKinds
            sendersFaults[known ? kind : "(other)", default: 0] += count
        }

        /// Results that have left their leaf.
        public var taken: Int { accepted + recorded + rejected + putBack + held + takenOut }

        /// Results that the daemon is done with: all but those that wait in another place now.
        public var settled: Int { accepted + recorded + rejected + held }

        /// Whether any row has left its partition: if so, look again soon.
        public var moved: Bool { taken + partitionsTaken > 0 }
    }

    /// Something that people should know about a row or a batch; the pass goes on.
    public enum Incident: Sendable {
        /// The mass-failure guard of a topic has opened or closed.
        case guardChanged(GuardTransition)
        /// A sealed partition could not be read whole, and is drained in place.
        case partitionNotRead(DatabaseError)
        /// A batch failed for a cause of its data, and was left for a retry to be looked at row by row.
        case batchSetAside(DatabaseError)
        /// A row was understood but refused by the database, and moved to `rejected_result`.
        case rowRejected(DatabaseError)
    }
}
