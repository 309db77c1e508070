/// The sizes of all measurements.
struct Scale {
    var rounds: Int
    /// Active tokens in the usual ledger, and in the large one.
    var tokens: Int
    var manyTokens: Int
    /// Queued results of a drain, and of a long one.
    var results: Int
    var manyResults: Int
    /// Queued registrations, and a long queue of them.
    var registrations: Int
    var manyRegistrations: Int
    /// Queued results of a drain with 410s only.
    var staleResults: Int
    /// Every n-th result is a 410: 2 %, 20 %, all.
    var deadEvery: [Int]
    /// Batch sizes to try for a peer; the fastest one is used.
    var batches: [Int]
    var idleProbes: Int
    var loadedProbes: Int
    /// Per round: calls of the gate, calls of register, and inserted rows.
    var calls: Int
    var inserts: Int
    /// Per round: requests that a client sends to APNs, and requests that the daemon sends from the outbox.
    var sends: Int
    var outboxSends: Int
    /// Rows of an attached table, rows of a statement that writes many, and rounds.
    var attachedRows: Int
    var attachedBulk: Int
    var attachRounds: Int
    /// Seconds of rest and of load.
    var restSeconds: Int
    var loadSeconds: Int
    /// The sizes of the measurement `extremes` are divided by this.
    var fleetDivisor: Int
    /// The steps of the growing ledger, in tokens, and the results that are drained at each.
    var growth: [Int]
    var grownResults: Int

    static let full = Scale(
        rounds: 5, tokens: 1_000_000, manyTokens: 10_000_000, results: 1_000_000, manyResults: 10_000_000,
        registrations: 1_000_000, manyRegistrations: 10_000_000, staleResults: 1_000_000,
        deadEvery: [50, 5, 1], batches: [1000, 5000, 20_000, 50_000, 100_000], idleProbes: 50, loadedProbes: 400,
        calls: 20_000, inserts: 100_000, sends: 100_000, outboxSends: 50_000,
        attachedRows: 1_000_000, attachedBulk: 100_000, attachRounds: 7, restSeconds: 15, loadSeconds: 10,
        fleetDivisor: 1,
        growth: [1_000_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000], grownResults: 500_000)

    static let quick = Scale(
        rounds: 3, tokens: 50_000, manyTokens: 300_000, results: 50_000, manyResults: 300_000,
        registrations: 100_000, manyRegistrations: 200_000, staleResults: 15_000,
        deadEvery: [50, 1], batches: [10_000], idleProbes: 4, loadedProbes: 60,
        calls: 3000, inserts: 20_000, sends: 20_000, outboxSends: 10_000,
        attachedRows: 50_000, attachedBulk: 20_000, attachRounds: 3, restSeconds: 3, loadSeconds: 1,
        fleetDivisor: 20,
        growth: [100_000, 300_000], grownResults: 50_000)

    /// How many results a drain has.
    func results(_ deadEvery: Int) -> Int { deadEvery == 1 ? staleResults : results }

    static func percent(_ deadEvery: Int) -> String { "\(100 / deadEvery) %" }

    static func short(_ count: Int) -> String {
        count % 1_000_000 == 0 ? "\(count / 1_000_000) million" : "\(count / 1000) thousand"
    }
}
