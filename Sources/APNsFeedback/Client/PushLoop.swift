internal import CCurl
internal import TokenModel

/// The loop of a thread: gives each client its turns, and waits for the sockets of all.
struct PushLoop {
    private let multi: MultiHandle
    private var works: [PushWork]

    init(_ clients: [PushClient], _ multi: MultiHandle) {
        self.multi = multi
        let buffer = ReadBuffer()
        works = clients.map { PushWork($0, multi, buffer) }
    }

    /// Returns when all clients have stopped.
    mutating func run() {
        let patience = works.map(\.options.answerTimeout).min() ?? .seconds(30)
        let standstill = works.map(\.options.standstill).min() ?? .seconds(30)
        let tick = max(.milliseconds(10), min(.seconds(1), patience / 10))
        var now = ContinuousClock.now
        var checkedAt = now
        var judgesFrom = now
        while !works.isEmpty {
            let turnBegan = now
            now = .now
            let time = Instant.now
            let stoodStill = now - turnBegan > standstill && works.contains(where: \.isBusy)
            // What came meanwhile has not been read, and may take a while. So all requests in flight have more time.
            if now - turnBegan > tick * 3 { judgesFrom = now + min(now - turnBegan, patience) }
            let isTick = now - checkedAt >= tick
            if isTick { checkedAt = now }
            for (tls, code) in multi.connect() { _ = works.contains { $0.take(tls, code, at: now) } }
            for work in works {
                work.turn(at: now, time, stoodStill: stoodStill, isTick: isTick, judges: now >= judgesFrom)
            }
            works.removeAll(where: \.isOver)
            // Another one is the first to get a place for a connection.
            if isTick, let first = works.first { works = works.dropFirst() + [first] }
            wait(tick: tick, after: now)
        }
    }

    private func wait(tick: Duration, after now: ContinuousClock.Instant) {
        if works.isEmpty { return }
        let links = works.map(\.links)
        var sockets = links.flatMap { $0.map(\.poll) }
        let until = works.compactMap { $0.wakesAt(tick: tick) }.min()
        // Even if one client has more to read, the others must get theirs.
        let hasNews = works.contains(where: \.hasNews)
        let pause = until.map { now.duration(to: $0) } ?? .seconds(60)
        multi.wait(for: &sockets, milliseconds: hasNews ? 0 : pause.wholeMilliseconds)
        var rest = sockets[...]
        for (work, links) in zip(works, links) {
            work.polled(links, rest.prefix(links.count))
            rest = rest.dropFirst(links.count)
        }
    }
}
