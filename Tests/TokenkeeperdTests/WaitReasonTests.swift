import Testing
import TokenLedger

@testable import tokenkeeperd

@Suite struct `Why results wait` {
    private let queue = Heartbeat.Queue(depth: 7, exact: true)

    @Test func `nothing is said of an empty queue, but of one whose length is not known`() {
        let reason = WaitReason(trouble: DatabaseError(sqlState: "53100", message: "full"))
        #expect(reason.words(for: Heartbeat.Queue(depth: 0, exact: true)) == nil)
        #expect(
            reason.words(for: Heartbeat.Queue(depth: 0, exact: false)) == "PostgreSQL reports: full (SQLSTATE 53100)")
    }

    @Test func `what PostgreSQL refuses comes before a lock, and a lock before a backlog`() {
        var reason = WaitReason(
            trouble: DatabaseError(sqlState: "53100", message: "full"), holders: [], settled: 100, period: .seconds(5))
        #expect(reason.words(for: queue) == "PostgreSQL reports: full (SQLSTATE 53100)")
        reason.trouble = nil
        #expect(reason.words(for: queue) == "of a lock in PostgreSQL: no session holds one for long")
        reason.holders = nil
        #expect(reason.words(for: queue) == "the daemon is draining them, at least 20 a second")
    }

    @Test func `results that wait for another attempt are counted`() {
        var queue = queue
        queue.retries = 2
        var reason = WaitReason(settled: 100, period: .seconds(5))
        #expect(
            reason.words(for: queue)
                == "the daemon is draining them, at least 20 a second; 2 of them wait for another attempt")
        reason.settled = 0
        #expect(reason.words(for: queue) == "2 of them wait for another attempt")
    }

    @Test func `a daemon that has recorded nothing says so, unless it has just begun`() {
        #expect(
            WaitReason(period: .seconds(5)).words(for: queue)
                == "the daemon has recorded none of them within the last 5 s")
        #expect(WaitReason(period: .milliseconds(10)).words(for: queue) == nil)
    }
}
