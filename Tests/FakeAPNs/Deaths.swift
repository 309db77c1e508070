import Synchronization

/// Which device tokens are dead, since when, and until when.
public final class Deaths: Sendable {
    /// All instants are milliseconds since the Unix epoch, by the server's clock.
    public struct Death: Sendable {
        /// Nil: of all topics. APNs itself tells by topic.
        public var topic: String?
        /// From then on 410, with this as its timestamp.
        public var at: Int64
        /// From then on 200 again; nil: it stays dead.
        public var revivedAt: Int64?
        /// Unregistered or ExpiredToken.
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
    // So that a server without deaths pays nothing.
    private let isEmpty = Atomic(true)

    init() {}

    /// - Parameter token: Hex, in either case.
    public func die(_ token: String, _ death: Death) {
        state.withLock { $0.tokens[token.lowercased(), default: []].append(death) }
        isEmpty.store(false, ordering: .releasing)
    }

    /// This share of all tokens, chosen by their text: always the same ones.
    ///
    /// - Parameter share: 0 to 1.
    public func die(share: Double, _ death: Death) {
        state.withLock { $0.shares.append((share, death)) }
        isEmpty.store(false, ordering: .releasing)
    }

    /// The token lives again, for all topics. One that died by share stays dead.
    public func revive(_ token: String) {
        state.withLock { $0.tokens[token.lowercased()] = nil }
    }

    /// The death of this token for this topic, if it is dead at that instant; of several the latest.
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

    /// 0 to 1, by FNV-1a and a mix, the same in every process.
    static func position(of token: String) -> Double {
        var hash: UInt64 = 0xcbf2_9ce4_8422_2325
        for byte in token.utf8 { hash = (hash ^ UInt64(byte)) &* 0x100_0000_01b3 }
        hash = (hash ^ (hash >> 30)) &* 0xBF58_476D_1CE4_E5B9
        return Double((hash ^ (hash >> 27)) >> 11) / Double(1 << 53)
    }
}
