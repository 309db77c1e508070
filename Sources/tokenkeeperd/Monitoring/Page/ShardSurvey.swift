internal import Dispatch
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Looks at all shards for the status page, and only while somebody looks at the page: with 64 shards and 64 daemons, each of which
/// looked every ten seconds, a shard would be asked six times a second.
final class ShardSurvey: Sendable {
    /// What the last look found.
    struct Found: Sendable {
        /// In the order of their numbers.
        var shards: [ShardStatus]
        var at: Instant
    }

    /// When a look began and ended.
    private typealias Times = (began: ContinuousClock.Instant, ended: ContinuousClock.Instant)

    /// When to look, and for how long what was found counts. Pure.
    struct Schedule {
        private var found: Found?
        private var isLooking = false
        private var times: Times?

        /// - Returns: What was found last, nil if nothing was lately; and whether a look begins.
        mutating func ask(at now: ContinuousClock.Instant) -> (found: Found?, begins: Bool) {
            let begins = !isLooking && times.map { now >= $0.began + ShardSurvey.pause } ?? true
            if begins { isLooking = true }
            // While a look takes long, the page shows the one before.
            let isOld = times.map { now > $0.ended + ShardSurvey.keptFor + $0.began.duration(to: $0.ended) } ?? true
            return (isOld ? nil : found, begins)
        }

        mutating func end(_ found: Found, from began: ContinuousClock.Instant, to ended: ContinuousClock.Instant) {
            self = Schedule()
            (self.found, times) = (found, (began, ended))
        }

        var isDue: Bool { isLooking }
    }

    private let map: ShardMap
    private let own: DatabaseAddress
    private let bell = Wakeup()
    private let schedule = Mutex(Schedule())

    /// How often to look at most. The page refreshes itself every 15 seconds.
    private static let pause: Duration = .seconds(10)
    /// How many shards are asked at the same time.
    private static let atOnce = 16
    /// How long an answer counts. If nobody looks at the page, it is not renewed.
    private static let keptFor: Duration = .seconds(30)

    init(_ map: ShardMap, own: DatabaseAddress) {
        self.map = map
        self.own = own
    }

    /// Called for each request of the page. Never waits: what this begins shows on the next one.
    ///
    /// - Returns: What was found last; nil if nothing was lately.
    func found(at now: ContinuousClock.Instant = .now) -> Found? {
        let (found, begins) = schedule.withLock { $0.ask(at: now) }
        if begins { bell.ring() }
        return found
    }

    /// Runs until the process ends, which does not wait for it.
    func run() {
        while true {
            bell.wait(for: .seconds(3600))
            if schedule.withLock({ $0.isDue }) { look() }
        }
    }

    private func look() {
        let began = ContinuousClock.now
        let answers = Mutex([Int: ShardStatus]())
        // Several at a time: those that do not answer must not delay all others.
        let (slots, group) = (DispatchSemaphore(value: Self.atOnce), DispatchGroup())
        let queue = DispatchQueue(label: "survey", attributes: .concurrent)
        for number in 0..<map.count.number {
            slots.wait()
            queue.async(group: group) { [self] in
                let status = ShardStatus(number, in: map, as: own)
                answers.withLock { $0[number] = status }
                slots.signal()
            }
        }
        group.wait()
        let shards = answers.withLock { $0.values.sorted { $0.number < $1.number } }
        schedule.withLock { $0.end(Found(shards: shards, at: .now), from: began, to: .now) }
    }
}
