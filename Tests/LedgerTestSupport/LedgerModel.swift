import TokenLedger

/// The rule as a model: the ledger as a function of all registrations and results, in whatever order they arrived.
public struct LedgerModel {
    public struct Key: Hashable, Sendable {
        public var environment: String
        public var topic: String
        public var token: String

        public init(_ environment: String, _ topic: String, _ token: String) {
            self.environment = environment
            self.topic = topic
            self.token = token
        }
    }

    struct Registration {
        var at: Int
        /// Empty: it belongs to no device, or no user. Nil: as before.
        var device: String?
        var user: String?
        var tags: String?
    }

    /// A 410, a suspect or a logout.
    struct Invalidation: Hashable {
        var cause: Cause
        var at: Int
        var reason: String
        /// Nil for a logout by the application itself: no undo touches it.
        var receivedAt: Int?
    }

    private var registrations: [Key: [Registration]] = [:]
    private var invalidations: [Key: Set<Invalidation>] = [:]

    private var exclusions: [Scope: [ClosedRange<Int>]] = [:]

    /// Why a token is invalid. On a tie of their instants, the first counts.
    public enum Cause: String, CaseIterable, Sendable {
        case stale
        case suspect
        case unregisteredByApp = "unregistered_by_app"
    }

    /// What an undo concerns, within its window. Thousands of them in one list would take most of a long test's time.
    private struct Scope: Hashable {
        var environment: String
        var topic: String
        var cause: Cause
    }

    public init() {}

    /// Instants are whole seconds since 1970.
    public mutating func register(
        _ key: Key, _ at: Int, device: String? = nil, tags: String? = nil, user: String? = nil
    ) {
        registrations[key, default: []].append(Registration(at: at, device: device, user: user, tags: tags))
    }

    /// - Parameter receivedAt: Nil for a logout by the application itself.
    public mutating func invalidate(
        _ key: Key, _ cause: Cause, _ at: Int, _ reason: String = "", receivedAt: Int? = nil
    ) {
        invalidations[key, default: []].insert(
            Invalidation(cause: cause, at: at, reason: reason, receivedAt: receivedAt))
    }

    /// What was received within the window never counts.
    public mutating func reinstate(_ environment: String, _ topic: String, _ window: ClosedRange<Int>, _ cause: Cause) {
        exclusions[Scope(environment: environment, topic: topic, cause: cause), default: []].append(window)
    }

    /// The greatest of a cause that counts.
    private func greatest(_ cause: Cause, of key: Key) -> Invalidation? {
        let windows = exclusions[Scope(environment: key.environment, topic: key.topic, cause: cause)] ?? []
        return invalidations[key]?.filter { one in
            one.cause == cause && !windows.contains { window in one.receivedAt.map(window.contains) ?? false }
        }.max { ($0.at, $0.reason) < ($1.at, $1.reason) }
    }

    /// Forgets a token in every topic.
    public mutating func forget(_ token: String) {
        for key in registrations.keys where key.token == token { registrations[key] = nil }
        for key in invalidations.keys where key.token == token { invalidations[key] = nil }
    }

    /// What the token's latest registration that named or cleared it says; nil if that cleared it, or there is none.
    private func latest(_ named: KeyPath<Registration, String?>, of key: Key) -> String? {
        let name = registrations[key]?.compactMap { said in said[keyPath: named].map { (said.at, $0) } }.max {
            $0 < $1
        }?.1
        return name?.isEmpty == true ? nil : name
    }

    private func device(of key: Key) -> String? { latest(\.device, of: key) }

    private func registered(_ key: Key) -> Int? { registrations[key]?.map(\.at).max() }

    /// A device of a topic that has one token per device.
    private struct Device: Hashable {
        var environment: String
        var topic: String
        var name: String
    }

    private func known(_ name: String?, _ key: Key) -> Device? {
        guard let name, !name.isEmpty, !key.topic.hasSuffix(".push-type.liveactivity") else { return nil }
        return Device(environment: key.environment, topic: key.topic, name: name)
    }

    /// The tokens of each device. One with more than 20 is a constant, and counts for nothing.
    private func devices() -> [Device: [Key]] {
        var devices: [Device: [Key]] = [:]
        for key in registrations.keys {
            if let device = known(device(of: key), key) { devices[device, default: []].append(key) }
        }
        return devices.filter { $0.value.count <= 20 }
    }

    private func isSuperseded(_ key: Key, _ devices: [Device: [Key]]) -> Bool {
        guard let device = known(device(of: key), key), let at = registered(key) else { return false }
        return (devices[device] ?? []).contains { registered($0) ?? .min > at }
    }

    /// The tags of each current token, one line per token: the latest of its device's tokens. Only if no token of the device has moved to another one or
    /// from it: a token that moves takes along the tags that it has by then, which depends on the order.
    private func tags(_ devices: [Device: [Key]]) -> Set<String> {
        var moved: Set<Device> = []
        var movers: Set<Key> = []
        for (key, all) in registrations {
            let names = Set(all.compactMap(\.device))
            if names.count > 1 {
                movers.insert(key)
                moved.formUnion(names.compactMap { known($0, key) })
            }
        }
        var lines: Set<String> = []
        for key in registrations.keys where !movers.contains(key) && !isSuperseded(key, devices) {
            let device = known(device(of: key), key)
            if let device, moved.contains(device) { continue }
            let said = (device.flatMap { devices[$0] } ?? [key]).flatMap { registrations[$0] ?? [] }
            let latest = said.compactMap { one in one.tags.map { (one.at, $0) } }.max { $0 < $1 }
            lines.insert([key.environment, key.topic, key.token, latest?.1 ?? ""].joined(separator: "|"))
        }
        return lines
    }

    /// What the ledger says and the model does not, and the other way round; a few of each.
    public func differences(on connection: inout Connection) throws -> [String] {
        let devices = devices()
        let lines = Set(try connection.lines(Self.ledger, columns: Self.columns))
        let wanted = told(devices)
        let knownTags = Set(try connection.lines(Self.ledgerTags, columns: 4))
        let some: (String, Set<String>) -> [String] = { who, lines in lines.sorted().prefix(4).map { who + ": " + $0 } }
        // A token has a row in suppression if and only if it is suppressed.
        let derived = Set(
            try connection.lines(
                """
                SELECT encode(token_key, 'hex') FROM tokenkeeper.ledger AS l FULL JOIN tokenkeeper.suppression AS s USING (topic_id, token_key)
                WHERE l.suppressed IS DISTINCT FROM (s.since IS NOT NULL)
                """, columns: 1))
        return some("suppression", derived)
            + some("the count", Set(try connection.lines(Self.wrongCounts, columns: 5)))
            + some("the ledger", lines.subtracting(wanted))
            + some("the model", wanted.subtracting(lines))
            + some("tags by the model", tags(devices).subtracting(knownTags))
    }

    /// Counts of `token_count` that the ledger does not have: topic, whether registered, state, the tokens of the ledger, and the sum.
    public static let wrongCounts = """
        SELECT topic_id, registered, state, coalesce(l.tokens, 0), coalesce(c.tokens, 0)
        FROM (SELECT topic_id, registered_at > '-infinity' AS registered,
                     CASE WHEN suppressed THEN tokenkeeper.cause_of(stale_at, suspect_at, logged_out_at, superseded_at) ELSE 'active' END AS state,
                     count(*) AS tokens
              FROM tokenkeeper.ledger GROUP BY 1, 2, 3) AS l
        FULL JOIN (SELECT topic_id, registered, state, sum(tokens) AS tokens FROM tokenkeeper.token_count GROUP BY 1, 2, 3) AS c
            USING (topic_id, registered, state)
        WHERE coalesce(l.tokens, 0) <> coalesce(c.tokens, 0) ORDER BY 1, 2, 3
        """

    /// Registers each token once more that has to look at its device: two transactions may have brought a device its first two tokens at the same moment.
    public static let settle = """
        SELECT count(tokenkeeper.register(encode(l.token_key, 'hex'), t.topic, t.environment, l.registered_at))
        FROM tokenkeeper.ledger AS l JOIN tokenkeeper.topic AS t USING (topic_id) WHERE l.unresolved
        """

    /// `environment|topic|token|state|registered_at|invalidated_at|reason|device|user`, one line per known token.
    public func told() -> Set<String> { told(devices()) }

    private func told(_ devices: [Device: [Key]]) -> Set<String> {
        var lines: Set<String> = []
        for key in Set(registrations.keys).union(invalidations.keys) {
            let registered = registered(key)
            let device = device(of: key)
            var causes = Cause.allCases.compactMap { cause in
                greatest(cause, of: key).map { (state: cause.rawValue, at: $0.at, reason: $0.reason) }
            }
            if let registered, isSuperseded(key, devices) {
                causes.append(("superseded", registered, "a newer token of the same device"))
            }
            if registered == nil && causes.isEmpty { continue }
            // The first of the greatest, in this order.
            let cause = causes.max { $0.at < $1.at }.flatMap { top in causes.first { $0.at == top.at } }
            let suppressed = cause.map { $0.at >= registered ?? .min } ?? false
            let columns = [
                key.environment, key.topic, key.token, suppressed ? cause?.state ?? "" : "active",
                registered.map(String.init) ?? "", cause.map { String($0.at) } ?? "", cause?.reason ?? "", device ?? "",
                latest(\.user, of: key) ?? "",
            ]
            lines.insert(columns.joined(separator: "|"))
        }
        return lines
    }

    /// The number of columns of a line.
    public static let columns = 9

    /// The same lines, read from the ledger.
    public static let ledger = """
        SELECT t.environment, t.topic, t.token, t.state, extract(epoch FROM t.registered_at)::bigint,
               extract(epoch FROM t.invalidated_at)::bigint, t.reason, t.device_id, t.user_id
        FROM tokenkeeper.token AS t
        """

    private static let ledgerTags =
        "SELECT t.environment, t.topic, t.token, array_to_string(t.tags, ',') FROM tokenkeeper.token AS t WHERE t.registered_at IS NOT NULL"
}
