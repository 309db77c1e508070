import Foundation
import LedgerTestSupport

/// The time from the commit of a registration, queued by COPY, until the gate says yes, while other registrations arrive.
struct CopyToGate {
    let registrations: RegistrationWorkload
    let scale: Scale
    let report: Report
    /// The other registrations.
    let perSecond: Double

    private static let copy = "COPY tokenkeeper.registration (\(RegistrationWorkload.columns)) FROM STDIN"
    private static let batch = 100

    func run() throws {
        let lines = try registrations.lines()
        let waits = try (0..<scale.rounds).map { _ in
            let database = try registrations.copy()
            defer { try? database.drop() }
            return try round(lines, on: database)
        }
        let when = "from COPY to gate at half load, \(Int(perSecond)) registrations a second"
        report.compare(
            "\(when), p50", Spread(waits.map { Freshness.quantile(0.5, of: $0) }), digits: 1, unit: " ms")
        report.compare(
            "\(when), p99", Spread(waits.map { Freshness.quantile(0.99, of: $0) }), atMost: 150, digits: 1,
            unit: " ms")
    }

    private func round(_ lines: [[UInt8]], on database: Database) throws -> [Double] {
        // Tokens of devices that have logged out. An unknown token would be sendable before its registration.
        try database.session().run(
            """
            SELECT count(tokenkeeper.register(\(Self.token("i")), '\(RegistrationWorkload.topic)', device_id => 'probe-' || i)),
                   count(tokenkeeper.unregister(\(Self.token("i")), '\(RegistrationWorkload.topic)'))
            FROM generate_series(1, \(scale.loadedProbes)) AS i
            """)
        let daemons = try MeasuredDaemon.start(on: database, settings: [])
        defer { for daemon in daemons { daemon.stop() } }
        let application = try database.session()
        try application.run("SET synchronous_commit = off")
        let load = SendersLoad(perSecond: perSecond, batch: Self.batch) { first in
            guard first + Self.batch <= lines.count else { throw TestFailure("all registrations are queued") }
            try application.copy(Self.copy, rows: Array(lines[first..<first + Self.batch].joined()))
        }
        defer { load.end() }
        Thread.sleep(forTimeInterval: 1)
        // The load must not run out of rows.
        let waits = try probe(database, within: min(Double(scale.loadSeconds * 4), Double(lines.count) / perSecond - 2))
        try load.check()
        return waits
    }

    private static func token(_ number: String) -> String { "encode(sha256(('probe' || \(number))::bytea), 'hex')" }

    /// - Parameter seconds: No probe begins after this.
    /// - Returns: Milliseconds.
    private func probe(_ database: Database, within seconds: Double) throws -> [Double] {
        let gate = try PreparedClient(database)
        try gate.prepare("ask", "SELECT tokenkeeper.is_sendable($1, $2)")
        let application = try database.session()
        try application.run("SET synchronous_commit = off")
        let tokens = try application.texts(
            "SELECT \(Self.token("i")) FROM generate_series(1, \(scale.loadedProbes)) AS i")
        let deadline = ContinuousClock.now + .seconds(seconds)
        var waits: [Double] = []
        for (number, token) in tokens.enumerated() where ContinuousClock.now < deadline {
            Thread.sleep(forTimeInterval: Double.random(in: 0.005...0.035))
            let values = [token, RegistrationWorkload.topic]
            guard try gate.call("ask", values) == "f" else { throw TestFailure("the token of a probe is active") }
            let line = "production\t\(RegistrationWorkload.topic)\t\(token)\t\\N\tprobe-\(number + 1)\t\\N\t\\N\t\\N\n"
            try application.copy(Self.copy, rows: Array(line.utf8))
            let start = ContinuousClock.now
            // Not a tight loop: daemon and server share the cores with this process.
            while try gate.call("ask", values) == "f" {
                usleep(500)
                guard start.duration(to: .now) < .seconds(120) else { throw TestFailure("no answer in two minutes") }
            }
            waits.append(start.duration(to: .now) / .milliseconds(1))
        }
        return waits
    }
}
