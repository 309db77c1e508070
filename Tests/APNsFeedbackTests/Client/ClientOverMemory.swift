import Testing
import TokenModel

@testable import APNsFeedback

/// A pool and its sessions at work as in `PushWork`, without sockets: the other ends of the connections are the test.
struct ClientOverMemory {
    private(set) var pool: ConnectionPool
    private(set) var sessions: [Int: SessionOverMemory] = [:]
    private(set) var outcomes: [PushOutcome] = []
    /// The request of each stream, by connection.
    private(set) var requests: [Int: [Int32: PushRequest]] = [:]
    /// The number of connections so far.
    private(set) var connections = 0
    var now = ContinuousClock.now

    init(_ limits: ConnectionPool.Limits) {
        pool = ConnectionPool(PushServer(host: "h.example"), limits) { _ in false }
    }

    mutating func submit(_ requests: [PushRequest]) throws {
        for request in requests { pool.add(Delivery(request)) }
        try work()
    }

    /// Takes bytes of the server, and does what follows. What the client sends is written at once.
    mutating func receive(_ bytes: [UInt8], on number: Int) throws {
        guard sessions[number] != nil else { return }
        do {
            try sessions[number]!.receive(bytes)
            pool.heard(number, at: now)
        } catch let error as HTTP2Session.Failure {
            try takeEvents(number)
            lose(number, error.message)
        }
        try takeEvents(number)
        try work()
    }

    mutating func lose(_ number: Int, _ message: String = "closed") {
        sessions[number] = nil
        pool.lost(number, .connectionLost, message, at: now)
        perform()
    }

    mutating func pass(_ time: Duration) throws {
        now += time
        pool.tick(at: now)
        try work()
    }

    mutating func endAll() {
        pool.endAll(at: now)
        perform()
    }

    private mutating func takeEvents(_ number: Int) throws {
        for event in sessions[number]?.takeEvents() ?? [] { pool.take(event, of: number, at: now, .now) }
        perform()
    }

    private mutating func work() throws {
        var goesOn = true
        while goesOn {
            goesOn = false
            perform()
            while let step = pool.next(at: now) {
                goesOn = true
                switch step {
                case .connect(let number):
                    sessions[number] = try SessionOverMemory(settings: nil)
                    connections = number
                    pool.connected(number, at: now)
                case .open(let number, let delivery):
                    guard let stream = sessions[number]?.open(delivery.request) else {
                        pool.couldNotBegin(delivery, on: number, at: now)
                        continue
                    }
                    requests[number, default: [:]][stream] = delivery.request
                    pool.began(delivery, on: stream, of: number, at: now)
                }
            }
            for number in sessions.keys.sorted() { try write(number) }
        }
        perform()
    }

    private mutating func write(_ number: Int) throws {
        guard let ends = try sessions[number]?.send().ends else { return }
        pool.wrote(number, ends: ends, isPending: false, hasMoved: !ends.isEmpty, at: now, .now)
        try takeEvents(number)
        if sessions[number]?.session.isOver == true { lose(number, "over") }
    }

    private mutating func perform() {
        for action in pool.takeActions() {
            switch action {
            case .end(let outcome): outcomes.append(outcome)
            case .didNotSend: break
            case .reset(let number, let stream): sessions[number]?.session.reset(stream)
            case .ping(let number): sessions[number]?.session.ping()
            case .close(let number, _): sessions[number] = nil
            }
        }
    }
}
