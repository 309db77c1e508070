import Synchronization

/// The device tokens that are dead, each with its begin and end.
public final class Deaths: Sendable {
    /// All instants are milliseconds since the Unix epoch, by the server's clock.
    public struct Death: Sendable {
        /// Nil for all topics. At APNs, a token is dead for one topic.
        public var topic: String?
        /// From this instant on, the response is 410 with this timestamp.
        public var at: Int64
        /// From this instant on, the response is 200 again. Nil if the token stays dead.
        public var revivedAt: Int64?
        /// `Unregistered` or `ExpiredToken`.
        public var reason: String

        public init(topic: String? = nil, at: Int64, revivedAt: Int64? = nil, reason: String = "Unregistered") {
            self.topic = topic
            self.at = at
            self.revivedAt = revivedAt
            self.reason = reason
        }
    }

    private struct State {
        var tokens: [String: [Death]] = [:]
        var shares: [(share: Double, death: Death)] = []
    }

    private let state = Mutex(State())
    // A server without deaths does not take the lock.
    private let isEmpty = Atomic(true)

    init() {}

    /// - Parameter token: Hex, in either case.
    public func die(_ token: String, _ death: Death) {
        state.withLock { $0.tokens[token.lowercased(), default: []].append(death) }
        isEmpty.store(false, ordering: .releasing)
    }

    /// A share of all tokens dies. The text of a token decides, so they are the same in every run.
    ///
    /// - Parameter share: 0 to 1.
    public func die(share: Double, _ death: Death) {
        state.withLock { $0.shares.append((share, death)) }
        isEmpty.store(false, ordering: .releasing)
    }

    /// Revives a token for all topics. A token that died by its share stays dead.
    public func revive(_ token: String) {
        state.withLock { $0.tokens[token.lowercased()] = nil }
    }

    /// The death of this token for this topic; the latest of several. Nil if it is not dead at that instant.
    public func death(of token: String, topic: String?, at now: Int64) -> Death? {
        if isEmpty.load(ordering: .acquiring) { return nil }
        let token = token.lowercased()
        return state.withLock { state in
            let ofShare = state.shares.lazy.filter { Self.position(of: token) < $0.share }.map(\.death)
            return ((state.tokens[token] ?? []) + ofShare)
                .filter { death in
                    (death.topic == nil || death.topic == topic) && death.at <= now
                        && death.revivedAt.map { now < $0 } != false
                }
                .max { $0.at < $1.at }
        }
    }

    /// A number from 0 to 1 (FNV-1a, then a mix), the same in every process.
    static func position(of token: String) -> Double {
        var hash: UInt64 = 0xcbf2_9ce4_8422_2325
        for byte in token.utf8 { hash = (hash ^ UInt64(byte)) &* 0x100_0000_01b3 }
        hash = (hash ^ (hash >> 30)) &* 0xBF58_476D_1CE4_E5B9
        return Double((hash ^ (hash >> 27)) >> 11) / Double(1 << 53)
    }
}
