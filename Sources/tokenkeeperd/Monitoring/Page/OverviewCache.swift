internal import Synchronization
internal import TokenLedger

/// What the page shows, as it was last read. A request reads it here and never asks PostgreSQL.
final class OverviewCache: Sendable {
    struct Contents: Sendable {
        var overview: Overview?
        var history: OverviewHistory?
        var usual: UsualShare?
        /// When the overview was read, by our clock.
        fileprivate(set) var readAt: ContinuousClock.Instant?
        fileprivate var pause: Duration = .zero

        /// Whether three looks are missing, so that the overview may no longer be true.
        func isOld(at now: ContinuousClock.Instant = .now) -> Bool { readAt.map { now > $0 + pause * 3 } ?? false }
    }

    private let stored = Mutex(Contents())

    func store(_ overview: Overview, at now: ContinuousClock.Instant = .now) {
        stored.withLock { ($0.overview, $0.readAt) = (overview, now) }
    }
    func store(_ history: OverviewHistory) { stored.withLock { $0.history = history } }

    func store(_ usual: UsualShare?) { stored.withLock { $0.usual = usual } }

    /// The next look comes after this pause.
    func expect(within pause: Duration) { stored.withLock { $0.pause = pause } }

    var contents: Contents { stored.withLock { $0 } }
}
