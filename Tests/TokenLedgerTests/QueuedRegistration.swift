import LedgerTestSupport
import TokenLedger

/// A row of the queue of registrations, and the calls of `register` or `unregister` that it stands for.
struct QueuedRegistration: Sendable {
    var topic: String
    var token: String
    /// Whole seconds since 1970.
    var at: Int
    var device: String?
    var user: String?
    var tags: String?
    var isLogout = false
    var source: String?

    private static func literal(_ text: String?) -> String { text.map { "'\($0)'" } ?? "NULL" }
    private var tagsLiteral: String { tags.map { "'{\($0)}'" } ?? "NULL" }

    /// The same by a direct call.
    var call: String {
        isLogout
            ? "SELECT tokenkeeper.unregister('\(token)', '\(topic)', 'production', to_timestamp(\(at)))"
            : """
            SELECT tokenkeeper.register('\(token)', '\(topic)', 'production', to_timestamp(\(at)), \(Self.literal(device)), \(tagsLiteral),
                                        \(Self.literal(user)))
            """
    }

    /// As an element of the array that `apply_registrations` takes.
    var element: String {
        """
        ROW(NULL, '\(topic)', '\(token)', to_timestamp(\(at)), \(Self.literal(device)), \(Self.literal(user)), \(tagsLiteral), \(isLogout),
            \(source ?? "NULL"), NULL, NULL, clock_timestamp(), 0, NULL, NULL)::tokenkeeper.registration
        """
    }

    func apply(to model: inout LedgerModel) {
        let key = LedgerModel.Key("production", topic, token)
        if isLogout {
            model.invalidate(key, .unregisteredByApp, at, "unregistered by the app")
        } else {
            model.register(key, at, device: device, tags: tags, user: user)
        }
    }

    /// One of a few: with moves between devices, and names that are kept or cleared.
    ///
    /// - Parameter instants: How many instants there are: with few of them, many rows tie.
    static func random(
        _ topic: String, tokens: Int, devices: Int, instants: Int = 400, _ chance: inout SeededChance
    ) -> Self {
        func name(_ prefix: String, of count: Int) -> String? {
            switch Int.random(in: 0..<10, using: &chance) {
            case 0..<3: nil
            case 3: ""
            default: "\(prefix)\(Int.random(in: 0..<count, using: &chance))"
            }
        }
        return Self(
            topic: topic, token: String(0x100 + Int.random(in: 0..<tokens, using: &chance), radix: 16) + "0",
            at: 1_700_000_000 + Int.random(in: 0..<instants, using: &chance), device: name("d", of: devices),
            user: name("u", of: 3),
            tags: Int.random(in: 0..<4, using: &chance) == 0 ? "g\(Int.random(in: 0..<5, using: &chance))" : nil,
            isLogout: Int.random(in: 0..<6, using: &chance) == 0)
    }
}

extension Connection {
    /// What `apply_registrations` returns.
    struct Applied: Equatable {
        var applied = 0
        var rejected = 0
        var notKept = 0
        var held = 0
        var waiting = 0
    }

    @discardableResult
    mutating func apply(_ rows: [QueuedRegistration]) throws -> Applied {
        try applyRows("ARRAY[\(rows.map(\.element).joined(separator: ","))]::tokenkeeper.registration[]")
    }

    /// Applies what waits in registration_retry, in one batch, or each row in a batch of its own.
    @discardableResult
    mutating func applyWaiting(limit: Int = 1_000_000) throws -> Applied {
        try run(
            """
            BEGIN; SET LOCAL lock_timeout = '50ms';
            CREATE TEMPORARY TABLE taken ON COMMIT DROP AS SELECT * FROM tokenkeeper.registration_retry WITH NO DATA
            """)
        try run(
            """
            WITH gone AS (DELETE FROM tokenkeeper.registration_retry
                          WHERE ctid = ANY (ARRAY(SELECT ctid FROM tokenkeeper.registration_retry LIMIT \(limit))) RETURNING *)
            INSERT INTO taken SELECT * FROM gone
            """)
        let applied = try applyRows("ARRAY(SELECT t::text::tokenkeeper.registration FROM taken AS t)")
        try run("COMMIT")
        return applied
    }

    private mutating func applyRows(_ rows: String) throws -> Applied {
        let counts = try lines(
            "SELECT applied, rejected, not_kept, held, waiting FROM tokenkeeper.apply_registrations(\(rows), 1, 0.1, 1000)",
            columns: 5
        )[0].split(separator: "|").map { Int($0) ?? -1 }
        return Applied(
            applied: counts[0], rejected: counts[1], notKept: counts[2], held: counts[3], waiting: counts[4])
    }
}
