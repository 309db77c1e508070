import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

/// What the ledger must say about logouts: the greatest direct one, and the greatest of a source that was received outside every undone window.
private struct LogoutModel {
    struct Logout: Hashable {
        var token: Int
        var at: Int
        var receivedAt: Int
    }

    var registered: [Int: Int] = [:]
    var direct: [Int: Int] = [:]
    var logouts: Set<Logout> = []
    var windows: [ClosedRange<Int>] = []

    /// token, state, registered, invalidated
    var lines: Set<String> {
        var lines: Set<String> = []
        for token in Set(registered.keys).union(direct.keys).union(logouts.map(\.token)) {
            let counting = logouts.filter { logout in
                logout.token == token && !windows.contains { $0.contains(logout.receivedAt) }
            }
            let out = (counting.map(\.at) + [direct[token]].compactMap(\.self)).max()
            let registered = registered[token]
            if out == nil && registered == nil { continue }
            let isOut = out.map { $0 >= registered ?? .min } ?? false
            lines.insert(
                "\(String(token, radix: 16))|\(isOut ? "unregistered_by_app" : "active")|\(registered.map(String.init) ?? "")|\(out.map(String.init) ?? "")"
            )
        }
        return lines
    }
}

@Suite(.ownThread) struct `Logouts, compared with a model` {
    /// Registrations, logouts by the application and by a source, called or queued, late, repeated and out of order; logouts that the guard holds,
    /// released or discarded; undone windows. `TEST_SEED` repeats a run.
    @Test func `random histories end in the state that the model gives`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var held = 0
        for history in 0..<Soak.size(6, whole: 60) {
            let database = try TestCluster.shared.database()
            try database.psql(
                "INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('attachment', 'public.devices')")
            var owner = try database.connect()
            var daemon = try database.connect(user: "a_daemon")
            try owner.execute(
                "INSERT INTO tokenkeeper.topic_policy (environment, topic, guard_allowance, guard_max_share) VALUES ('production', 't', \(history), 0)"
            )
            var model = LogoutModel()
            let start = 1_700_000_000
            for _ in 0..<150 {
                let at = start + Int.random(in: 0..<60, using: &chance) * 60
                let first = Int.random(in: 0x1001...0x100a, using: &chance)
                let tokens = first...(first + [0, 0, 3].randomElement(using: &chance)!)
                switch Int.random(in: 0..<100, using: &chance) {
                case 0..<35:
                    let isQueued = Bool.random(using: &chance)
                    if isQueued { try Self.queue(tokens, at: at, on: &owner) }
                    for token in tokens {
                        if !isQueued {
                            try owner.execute(
                                "SELECT tokenkeeper.register('\(String(token, radix: 16))', 't', registered_at => to_timestamp(\(at)))"
                            )
                        }
                        model.registered[token] = max(model.registered[token] ?? at, at)
                    }
                case 35..<50:
                    let isQueued = Bool.random(using: &chance)
                    if isQueued { try Self.queue(tokens, at: at, isLogout: true, on: &owner) }
                    for token in tokens {
                        if !isQueued {
                            try owner.execute(
                                "SELECT tokenkeeper.unregister('\(String(token, radix: 16))', 't', at => to_timestamp(\(at)))"
                            )
                        }
                        model.direct[token] = max(model.direct[token] ?? at, at)
                    }
                case 50..<85:
                    let receivedAt = start + Int.random(in: 0..<90, using: &chance) * 60
                    try Self.queue(tokens, at: at, isLogout: true, source: 1, receivedAt: receivedAt, on: &owner)
                    // An instant after it was received counts as then.
                    for token in tokens {
                        model.logouts.insert(.init(token: token, at: min(at, receivedAt), receivedAt: receivedAt))
                    }
                case 85..<92:
                    // What would_reinstate says is about what is recorded.
                    held += try drainAll(&daemon).registrations.held
                    let since = start + Int.random(in: 0..<90, using: &chance) * 60
                    let window = since...(since + Int.random(in: 0..<10, using: &chance) * 60)
                    let would = try owner.scalar("SELECT tokenkeeper.would_reinstate(\(Self.arguments(window)))")
                    let recorded = try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE NOT sendable")
                    try owner.execute("SELECT tokenkeeper.reinstate(\(Self.arguments(window)))")
                    try undo(&daemon)
                    let left = try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE NOT sendable")
                    #expect(
                        Int(recorded ?? "").flatMap { all in Int(left ?? "").map { all - $0 } } == Int(would ?? ""),
                        "seed \(seed)")
                    model.windows.append(window)
                case 92..<96:
                    held += try drainAll(&daemon).registrations.held
                    try Self.release(&owner, &daemon)
                default:
                    held += try drainAll(&daemon).registrations.held
                    let gone = try owner.lines(
                        "SELECT token, extract(epoch FROM invalidated_at)::bigint, extract(epoch FROM queued_at)::bigint FROM tokenkeeper.held_registration",
                        columns: 3)
                    try owner.execute("SELECT tokenkeeper.discard_held('t')")
                    for line in gone {
                        let parts = line.split(separator: "|")
                        let logout = LogoutModel.Logout(
                            token: Int(parts[0], radix: 16)!, at: Int(parts[1])!, receivedAt: Int(parts[2])!)
                        // The same one may have been recorded at another time.
                        let isRecorded = try owner.scalar(
                            """
                            SELECT count(*) FROM tokenkeeper.receipt
                            WHERE token_key = decode('\(parts[0])', 'hex') AND source_id IS NOT NULL
                              AND invalidated_at = to_timestamp(\(parts[1])) AND received_at = to_timestamp(\(parts[2]))
                            """)
                        if isRecorded == "0" { model.logouts.remove(logout) }
                    }
                }
                // Otherwise several steps are in one batch.
                if Int.random(in: 0..<3, using: &chance) == 0 { held += try drainAll(&daemon).registrations.held }
            }
            held += try drainAll(&daemon).registrations.held
            try Self.release(&owner, &daemon)
            #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.registration") == "0", "seed \(seed)")
            let told = Set(
                try owner.lines(
                    """
                    SELECT token, state, extract(epoch FROM registered_at)::bigint, extract(epoch FROM invalidated_at)::bigint FROM tokenkeeper.token
                    """, columns: 4))
            let (surplus, missing) = (told.subtracting(model.lines), model.lines.subtracting(told))
            #expect(
                surplus.isEmpty && missing.isEmpty,
                "seed \(seed): told \(surplus.sorted().prefix(5)), the model says \(missing.sorted().prefix(5))")
            // The receipts give the ledger's instant.
            #expect(
                try owner.scalar(
                    """
                    SELECT count(*) FROM tokenkeeper.ledger AS l
                    JOIN (SELECT token_key, max(invalidated_at) AS at FROM tokenkeeper.receipt GROUP BY 1) AS r USING (token_key)
                    WHERE l.unregistered_by_app_at IS DISTINCT FROM r.at
                    """) == "0", "seed \(seed)")
        }
        #expect(held > 0, "seed \(seed): the guard held \(held) logouts")
    }

    /// - Parameter receivedAt: When it was queued; nil for now.
    private static func queue(
        _ tokens: ClosedRange<Int>, at: Int, isLogout: Bool = false, source: Int? = nil, receivedAt: Int? = nil,
        on owner: inout Connection
    ) throws {
        try owner.execute(
            """
            INSERT INTO tokenkeeper.registration (topic, token, registered_at, unregistered, source_id, queued_at)
            SELECT 't', to_hex(n), to_timestamp(\(at)), \(isLogout), \(source.map(String.init) ?? "NULL"),
                   \(receivedAt.map { "to_timestamp(\($0))" } ?? "clock_timestamp()")
            FROM generate_series(\(tokens.lowerBound), \(tokens.upperBound)) AS n
            """)
    }

    private static func arguments(_ window: ClosedRange<Int>) -> String {
        "'t', 'production', to_timestamp(\(window.lowerBound)), to_timestamp(\(window.upperBound)), 'unregistered_by_app'"
    }

    /// Releases what is held, and records it.
    private static func release(_ owner: inout Connection, _ daemon: inout Connection) throws {
        try owner.execute("SELECT tokenkeeper.release_held('t')")
        let pass = try drainAll(&daemon)
        #expect(pass.registrations.held == 0, "what is released is not held again")
    }
}
