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

    struct Word: Hashable {
        var at: Int
        var reason: String
    }

    private var registrations: [Key: [Registration]] = [:]
    /// A 410, and when it was received.
    struct Receipt: Hashable {
        var word: Word
        var receivedAt: Int
    }

    private var stale: [Key: Set<Receipt>] = [:]
    private var suspects: [Key: Set<Word>] = [:]
    /// A logout. The application itself says nothing about when it was received: an undo leaves its logouts alone.
    struct Logout: Hashable {
        var at: Int
        var receivedAt: Int?
    }

    private var unregistrations: [Key: Set<Logout>] = [:]

    /// That a tag was added or removed.
    struct TagChange {
        var at: Int
        var tag: String
        var isAdded: Bool
    }

    private var tagChanges: [Key: [TagChange]] = [:]
    /// By environment, topic and device.
    private var deviceTagChanges: [[String]: [TagChange]] = [:]

    private var exclusions: [Scope: [ClosedRange<Int>]] = [:]

    /// What an undo is of.
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

    /// - Parameter receivedAt: When a source reported it; nil for a logout by the application itself.
    public mutating func unregister(_ key: Key, _ at: Int, receivedAt: Int? = nil) {
        unregistrations[key, default: []].insert(Logout(at: at, receivedAt: receivedAt))
    }

    public mutating func tag(_ key: Key, _ at: Int, _ tag: String, isAdded: Bool) {
        tagChanges[key, default: []].append(TagChange(at: at, tag: tag, isAdded: isAdded))
    }

    public mutating func tag(
        device: String, _ environment: String, _ topic: String, _ at: Int, _ tag: String, isAdded: Bool
    ) {
        deviceTagChanges[[environment, topic, device], default: []].append(
            TagChange(at: at, tag: tag, isAdded: isAdded))
    }

    public mutating func dies(_ key: Key, _ at: Int, _ reason: String, receivedAt: Int) {
        stale[key, default: []].insert(Receipt(word: Word(at: at, reason: reason), receivedAt: receivedAt))
    }

    public mutating func suspect(_ key: Key, _ at: Int, _ reason: String) {
        suspects[key, default: []].insert(Word(at: at, reason: reason))
    }

    /// Suspects whose instant lies in the window never count; or 410s, or logouts of a source, that were received in it.
    public mutating func reinstate(_ environment: String, _ topic: String, _ window: ClosedRange<Int>, _ cause: Cause) {
        exclusions[Scope(environment: environment, topic: topic, cause: cause), default: []].append(window)
    }

    private func isUndone(_ key: Key, _ instant: Int, _ cause: Cause) -> Bool {
        exclusions[Scope(environment: key.environment, topic: key.topic, cause: cause)]?.contains {
            $0.contains(instant)
        } ?? false
    }

    /// Forgets a token in every topic.
    public mutating func forget(_ token: String) {
        for key in registrations.keys where key.token == token { registrations[key] = nil }
        for key in stale.keys where key.token == token { stale[key] = nil }
        for key in suspects.keys where key.token == token { suspects[key] = nil }
        for key in unregistrations.keys where key.token == token { unregistrations[key] = nil }
        for key in tagChanges.keys where key.token == token { tagChanges[key] = nil }
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

    /// The token that each device's latest registration names. A registration belongs to the device if it names the device, or if
    /// its token does. A token that has left the device, to another one or to none, counts by the registrations that named the device.
    private func named() -> [[String]: String] {
        var latest: [[String]: (at: Int, token: String)] = [:]
        func says(_ key: Key, _ device: String, _ at: Int) {
            let of = [key.environment, key.topic, device]
            if let known = latest[of], known >= (at, key.token) { return }
            latest[of] = (at, key.token)
        }
        for (key, all) in registrations {
            for said in all { if let device = said.device, !device.isEmpty { says(key, device, said.at) } }
            if let device = device(of: key), let at = registered(key) { says(key, device, at) }
        }
        return latest.mapValues(\.token)
    }

    /// The tags of the token's latest registration that had any.
    private func ownTags(_ key: Key) -> (at: Int, tags: String)? {
        registrations[key]?.compactMap { said in said.tags.map { (said.at, $0) } }.max { $0 < $1 }
    }

    /// The latest tags of each device's tokens: the current token inherits them if it never had any of its own.
    private func deviceTags() -> [[String]: (at: Int, tags: String)] {
        var latest: [[String]: (at: Int, tags: String)] = [:]
        for key in registrations.keys {
            guard let device = device(of: key), let own = ownTags(key) else { continue }
            let of = [key.environment, key.topic, device]
            if let known = latest[of], known >= own { continue }
            latest[of] = own
        }
        return latest
    }

    /// A registration of the token with tags ends earlier changes.
    private func countingTagChanges(_ key: Key) -> [TagChange] {
        (tagChanges[key] ?? []).filter { $0.at >= ownTags(key)?.at ?? .min }
    }

    /// The changes of each device and of its tokens: they concern its current token.
    private func allDeviceTagChanges() -> [[String]: [TagChange]] {
        var all = deviceTagChanges
        for key in tagChanges.keys {
            guard let device = device(of: key) else { continue }
            all[[key.environment, key.topic, device], default: []] += countingTagChanges(key)
        }
        return all
    }

    /// What the changes leave: for each tag, the latest of the registration and the changes; at the same instant the change, and the removal before the
    /// addition.
    private static func apply(_ changes: [TagChange], to registered: (at: Int, tags: String)?) -> String? {
        var tags = registered.map { $0.tags.split(separator: ",").map(String.init) } ?? []
        var latest: [String: TagChange] = [:]
        for change in changes where change.at >= registered?.at ?? .min {
            if let known = latest[change.tag], (known.at, known.isAdded ? 0 : 1) >= (change.at, change.isAdded ? 0 : 1)
            {
                continue
            }
            latest[change.tag] = change
        }
        tags.removeAll { latest[$0]?.isAdded == false }
        for (tag, change) in latest.sorted(by: { $0.key < $1.key }) where change.isAdded && !tags.contains(tag) {
            tags.append(tag)
        }
        return tags.joined(separator: ",")
    }

    /// `environment|topic|token|state|registered_at|invalidated_at|reason|device|user|tags`, one line per known token.
    public func told() -> Set<String> {
        let named = named()
        let deviceTags = deviceTags()
        let deviceTagChanges = allDeviceTagChanges()
        var lines: Set<String> = []
        for key in Set(registrations.keys).union(stale.keys).union(suspects.keys).union(unregistrations.keys) {
            let counting = (suspects[key] ?? []).filter { !isUndone(key, $0.at, .suspect) }
            let gone = (stale[key] ?? []).filter { !isUndone(key, $0.receivedAt, .stale) }
            let logouts = (unregistrations[key] ?? []).filter { logout in
                logout.receivedAt.map { !isUndone(key, $0, .unregisteredByApp) } ?? true
            }
            let registered = registered(key)
            let device = device(of: key)
            let greatest = { (words: Set<Word>) in words.max { ($0.at, $0.reason) < ($1.at, $1.reason) } }
            var causes: [(state: String, at: Int, reason: String)] = []
            if let word = greatest(Set(gone.map(\.word))) { causes.append(("stale", word.at, word.reason)) }
            if let word = greatest(counting) { causes.append(("suspect", word.at, word.reason)) }
            if let at = logouts.map(\.at).max() {
                causes.append(("unregistered_by_app", at, "unregistered by the app"))
            }
            if let device, let registered, !key.topic.hasSuffix(".push-type.liveactivity"),
                named[[key.environment, key.topic, device]] != key.token
            {
                causes.append(("superseded", registered, "a newer token of the same device"))
            }
            if registered == nil && causes.isEmpty { continue }
            // The first of the greatest, in this order.
            let cause = causes.max { $0.at < $1.at }.flatMap { top in causes.first { $0.at == top.at } }
            let suppressed = cause.map { $0.at >= registered ?? .min } ?? false
            var registeredTags = ownTags(key)
            var changes = countingTagChanges(key)
            if let device, !key.topic.hasSuffix(".push-type.liveactivity"),
                named[[key.environment, key.topic, device]] == key.token
            {
                registeredTags = registeredTags ?? deviceTags[[key.environment, key.topic, device]]
                changes = deviceTagChanges[[key.environment, key.topic, device]] ?? []
            }
            let tags = Self.apply(changes, to: registeredTags)
            let columns = [
                key.environment, key.topic, key.token, suppressed ? cause?.state ?? "" : "active",
                registered.map(String.init) ?? "", cause.map { String($0.at) } ?? "", cause?.reason ?? "", device ?? "",
                latest(\.user, of: key) ?? "", tags ?? "",
            ]
            lines.insert(columns.joined(separator: "|"))
        }
        return lines
    }

    /// The number of columns of a line.
    public static let columns = 10

    /// The same lines, read from the ledger. A token of which only changes of tags are known has none.
    public static let ledger = """
        SELECT t.environment, t.topic, t.token, t.state, extract(epoch FROM t.registered_at)::bigint,
               extract(epoch FROM t.invalidated_at)::bigint, t.reason, t.device_id, t.user_id,
               array_to_string(t.tags, ',')
        FROM tokenkeeper.token AS t WHERE num_nulls(t.registered_at, t.invalidated_at) < 2
        """
}
