import Foundation
import LedgerTestSupport
import Synchronization

/// A program that queues rows continuously, such as a sender that queues results, a hundred at a time, 2 % of them 410s.
final class SendersLoad: Sendable {
    private let stop = Atomic(false)
    private let queued = Atomic(0)
    private let hasFailed = Atomic(false)
    private let perSecond: Double?
    private let batch: Int
    private let start = ContinuousClock.now
    private let finished = DispatchSemaphore(value: 0)

    /// Prepares the results to send, once per database.
    static func prepare(_ workload: Workload, rows: Int, on session: Session) throws {
        try session.run(
            """
            CREATE UNLOGGED TABLE stock AS
            SELECT row_number() OVER () AS id, r.* FROM (\(workload.results(0..<rows, deadEvery: 50))) AS r;
            CREATE UNIQUE INDEX ON stock (id)
            """)
        try session.run("ANALYZE stock")
    }

    /// A sender.
    ///
    /// - Parameter perSecond: Results per second; nil for as many as possible.
    convenience init(on database: Database, stock rows: Int, perSecond: Double?) throws {
        let session = try database.session()
        try session.run("SET synchronous_commit = off")
        let batch = 100
        self.init(perSecond: perSecond, batch: batch) { done in
            let first = done % (rows - batch) + 1
            try session.run(
                """
                INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, sent_at)
                SELECT environment, topic, token, status,
                       CASE WHEN status = 410 THEN '{"reason":"Unregistered","timestamp":'
                           || (extract(epoch FROM clock_timestamp()) * 1000)::bigint || '}' END, clock_timestamp()
                FROM stock WHERE id BETWEEN \(first) AND \(first + batch - 1)
                """)
        }
    }

    /// - Parameters:
    ///   - perSecond: Rows per second; nil for as many as possible.
    ///   - batch: How many rows `queue` queues.
    ///   - queue: Queues the rows after the first `done`.
    init(perSecond: Double?, batch: Int, _ queue: @escaping @Sendable (_ done: Int) throws -> Void) {
        self.perSecond = perSecond
        self.batch = batch
        let thread = Thread { [self] in
            while !stop.load(ordering: .relaxed) {
                let done = queued.load(ordering: .relaxed)
                if let perSecond {
                    let due = start + .seconds(Double(done) / perSecond)
                    if due > .now { Thread.sleep(forTimeInterval: ContinuousClock.now.duration(to: due) / .seconds(1)) }
                }
                do {
                    try queue(done)
                } catch {
                    Progress.say("the load ends: \(error)")
                    hasFailed.store(true, ordering: .relaxed)
                    break
                }
                queued.add(batch, ordering: .relaxed)
            }
            finished.signal()
        }
        thread.start()
    }

    /// - Throws: If the load has fallen behind its rate.
    func check() throws {
        let wanted = (perSecond ?? 0) * (start.duration(to: .now) / .seconds(1))
        let queued = queued.load(ordering: .relaxed)
        if hasFailed.load(ordering: .relaxed) || Double(queued) < 0.95 * wanted - Double(batch) {
            throw TestFailure("the load has queued \(queued) rows instead of \(Int(wanted))")
        }
    }

    /// Ends the load.
    ///
    /// - Returns: How many rows it has queued.
    @discardableResult
    func end() -> Int {
        stop.store(true, ordering: .relaxed)
        finished.wait()
        finished.signal()
        return queued.load(ordering: .relaxed)
    }
}
