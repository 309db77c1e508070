import Foundation
import LedgerTestSupport

/// The time from the commit of a 410 until the gate says no.
struct Freshness {
    let workload: Workload
    let database: Database

    /// The first position of the probes. A load uses the positions before it.
    static func firstPosition(_ workload: Workload) -> Int { workload.tokens / 2 }

    /// - Parameters:
    ///   - positions: Tokens that are still active.
    ///   - pause: How long to wait before each probe, in seconds.
    ///   - within: No probe begins after this many seconds.
    ///   - goesOn: Asked before each probe.
    /// - Returns: Milliseconds.
    func probe(
        _ positions: Range<Int>, pause: ClosedRange<Double>, within seconds: Int = 3600,
        while goesOn: () -> Bool = { true }
    ) throws -> [Double] {
        let sender = try PreparedClient(database)
        let gate = try PreparedClient(database)
        try sender.prepare(
            "send",
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            VALUES ($1, $2, 410, '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM clock_timestamp()) * 1000)::bigint || '}',
                    clock_timestamp())
            """)
        try gate.prepare("ask", "SELECT tokenkeeper.is_sendable($1, $2)")
        let tokens = try database.session().texts(
            """
            SELECT \(workload.topic("i")) || ' ' || \(workload.token("i"))
            FROM generate_series(\(positions.lowerBound)::bigint, \(positions.upperBound - 1)) AS i
            """
        ).map { $0.split(separator: " ").map(String.init) }
        var waits: [Double] = []
        let deadline = ContinuousClock.now + .seconds(seconds)
        for token in tokens where ContinuousClock.now < deadline && goesOn() {
            Thread.sleep(forTimeInterval: Double.random(in: pause))
            guard try gate.call("ask", [token[1], token[0]]) == "t" else {
                throw TestFailure("the token of a probe is suppressed already")
            }
            try sender.call("send", [token[0], token[1]])
            let start = ContinuousClock.now
            // Not a tight loop: daemon and server share two cores here.
            while try gate.call("ask", [token[1], token[0]]) == "t" {
                usleep(500)
                guard start.duration(to: .now) < .seconds(120) else { throw TestFailure("no answer in two minutes") }
            }
            waits.append(start.duration(to: .now) / .milliseconds(1))
        }
        return waits
    }

    /// The value that this share of the samples does not exceed.
    static func quantile(_ share: Double, of values: [Double]) -> Double {
        let sorted = values.sorted()
        guard !sorted.isEmpty else { return .nan }
        return sorted[min(sorted.count - 1, Int((Double(sorted.count) * share).rounded(.up)) - 1)]
    }
}
