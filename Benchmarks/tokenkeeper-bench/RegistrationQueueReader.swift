import Foundation
import LedgerTestSupport

/// Finds out when the queue of registrations is empty, without reading what is deleted over and over.
struct RegistrationQueueReader {
    private let session: Session
    /// Of each partition, the page of the first row at the last look. There are no rows before it any more.
    private var pages = [Int](repeating: 0, count: 9)

    /// How often to look.
    private static let pause: useconds_t = 10_000

    init(_ session: Session) { self.session = session }

    /// - Returns: When it was empty.
    mutating func waitUntilEmpty(isAlive: () -> Bool) throws -> ContinuousClock.Instant {
        let start = ContinuousClock.now
        while true {
            let now = ContinuousClock.now
            if try isEmpty() { return now }
            guard isAlive() else { throw TestFailure("the daemon has ended") }
            guard start.duration(to: now) < .seconds(3600) else { throw TestFailure("an hour, and rows are left") }
            usleep(Self.pause)
        }
    }

    private mutating func isEmpty() throws -> Bool {
        let looks = pages.indices.map { number in
            // Rows come and go in registration_retry wherever there is space.
            let table = number == 8 ? "tokenkeeper.registration_retry" : "tokenkeeper.registration_\(number)"
            return """
                (SELECT (ctid::text::point)[0]::bigint FROM \(table) WHERE ctid >= '(\(number == 8 ? 0 : pages[number]),0)' LIMIT 1)
                """
        }
        let columns = looks.map { "coalesce(\($0), -1)" }.joined(separator: ", ")
        let found = try session.text("SELECT concat_ws(' ', \(columns))")
        let first = (found ?? "").split(separator: " ").compactMap { Int($0) }
        for (number, page) in first.enumerated() where page >= 0 { pages[number] = page }
        return first.allSatisfy { $0 < 0 }
    }
}
