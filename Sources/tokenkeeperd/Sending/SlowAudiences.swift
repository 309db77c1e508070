internal import Synchronization
internal import TokenLedger

/// The campaigns whose audience takes long to find. The sender hands them over to `AddressingWorker`, so that neither other campaigns
/// nor single requests wait for them.
final class SlowAudiences: Sendable {
    private struct State {
        var wanted: [SendState.Source] = []
        /// Those whose patient search took too long: how to search next.
        var searches: [SendState.Source: Outbox.AudienceSearch] = [:]
        var failures: [(source: SendState.Source, error: DatabaseError)] = []
    }

    /// Rung when there is something to do.
    let wakeup = Wakeup()
    private let state = Mutex(State())

    /// So many requests of a campaign are addressed ahead of the claims: half a second at full speed.
    static let ahead = 10_000

    /// The time of a patient search: at first, and at most. Short at first, because the campaigns take turns. What a search has read is in
    /// memory for the next one.
    private static let patience: (first: Duration, most: Duration) = (.seconds(5), .seconds(60))

    /// Whether a statement was cancelled because it took too long.
    static func tookTooLong(_ error: DatabaseError) -> Bool { error.sqlState == "57014" }

    /// - Parameters:
    ///   - sources: All campaigns that are to be addressed now.
    ///   - known: These, and those that wait after a failure. The others are finished or paused, and their searches begin anew.
    func want(_ sources: [SendState.Source], of known: [SendState.Source]) {
        let isNew = state.withLock { state in
            defer { state.wanted = sources }
            state.searches = state.searches.filter { known.contains($0.key) }
            return !sources.allSatisfy(state.wanted.contains)
        }
        if isNew { wakeup.ring() }
    }

    /// What failed since the last call.
    func takeFailures() -> [(source: SendState.Source, error: DatabaseError)] {
        state.withLock { state in
            defer { state.failures = [] }
            return state.failures
        }
    }

    var wanted: [SendState.Source] { state.withLock { $0.wanted } }

    func search(for source: SendState.Source) -> Outbox.AudienceSearch {
        state.withLock { $0.searches[source] ?? .patient(Self.patience.first) }
    }

    /// A campaign could not be addressed. The sender decides when it is tried again.
    func failed(_ source: SendState.Source, _ error: DatabaseError) {
        state.withLock { state in
            state.wanted.removeAll { $0 == source }
            state.failures.append((source, error))
        }
    }

    /// A patient search took too long: the next one has twice the time, and after a minute, the ledger is read in ranges.
    func tookTooLong(_ source: SendState.Source, within time: Duration) {
        state.withLock { state in
            guard state.wanted.contains(source) else { return }
            state.searches[source] = time < Self.patience.most ? .patient(min(time * 2, Self.patience.most)) : .inRanges
        }
    }
}
