import Testing
import TokenModel

@testable import APNsFeedback

/// A pool at work without connections: what it does next, and what came of it.
private struct Stage {
    var pool: ConnectionPool
    var now = ContinuousClock.now
    /// The request of each stream, by connection.
    var streams: [Int: [Int32: PushRequest]] = [:]
    var connecting: [Int] = []
    private var lastStream: [Int: Int32] = [:]
    private(set) var outcomes: [PushOutcome] = []
    private(set) var resets: [Int32] = []
    /// The slots of requests that were not sent.
    private(set) var unsent: [Int] = []
    private(set) var closed: [Int] = []
    private(set) var pings = 0

    init(inFlight: Int = 500, connections: Int = 2) {
        let limits = ConnectionPool.Limits(
            inFlight: inFlight, connections: connections, answerTimeout: .seconds(30), idleTimeout: .seconds(3600))
        pool = ConnectionPool(PushServer(host: "h.example"), limits) { _ in true }
    }

    mutating func add(_ numbers: ClosedRange<Int>) {
        for number in numbers { pool.add(Delivery(request(number, slot: number))) }
        work()
    }

    /// Takes all steps. Connections wait to be connected.
    mutating func work() {
        perform()
        while let step = pool.next(at: now) {
            switch step {
            case .connect(let number): connecting.append(number)
            case .open(let number, let delivery):
                let stream = (lastStream[number] ?? -1) + 2
                lastStream[number] = stream
                streams[number, default: [:]][stream] = delivery.request
                pool.began(delivery, on: stream, of: number, at: now)
            }
        }
        perform()
    }

    private mutating func perform() {
        for action in pool.takeActions() {
            switch action {
            case .end(let outcome): outcomes.append(outcome)
            case .didNotSend(let slot): unsent.append(slot)
            case .reset(_, let stream): resets.append(stream)
            case .ping: pings += 1
            case .close(let number, _): closed.append(number)
            }
        }
    }

    /// The oldest attempt to connect succeeds.
    @discardableResult mutating func connect(mostStreams: Int? = 1000) -> Int {
        guard !connecting.isEmpty else {
            Issue.record("it does not connect")
            return 0
        }
        let number = connecting.removeFirst()
        pool.connected(number, at: now)
        if let mostStreams { tell(.settings(mostStreams: mostStreams), number) }
        work()
        return number
    }

    mutating func tell(_ event: SessionEvent, _ number: Int) {
        pool.take(event, of: number, at: now, .now)
        work()
    }

    mutating func write(_ streams: [Int32], _ number: Int) {
        pool.wrote(number, ends: streams, isPending: false, hasMoved: true, at: now, .now)
    }

    mutating func answer(_ stream: Int32, _ number: Int, _ status: Int32 = 200, reason: String? = nil) {
        let body = reason.map { #"{"reason":"\#($0)"}"# }
        tell(.answer(stream, PushResponse(status: status, body: body, apnsID: "id")), number)
        tell(.closed(stream, code: 0), number)
    }

    mutating func pass(_ time: Duration) {
        now += time
        pool.tick(at: now)
        work()
    }

    /// A connection that may have many streams, after its first request was answered.
    static func proven(inFlight: Int = 500, connections: Int = 2, requests: Int = 10) -> Stage {
        var stage = Stage(inFlight: inFlight, connections: connections)
        stage.add(1...requests)
        stage.connect()
        stage.write([1], 1)
        stage.answer(1, 1)
        return stage
    }
}

@Suite struct `The connections to a server` {
    @Test func `until SETTINGS and an answer have come, there is one connection with one stream`() {
        var stage = Stage()
        stage.add(1...50)
        #expect(stage.connecting == [1])
        stage.connect(mostStreams: nil)
        #expect(stage.streams[1]?.count == 1)
        stage.write([1], 1)
        stage.answer(1, 1)
        #expect(stage.streams[1]?.count == 2, "SETTINGS are missing")
        stage.tell(.settings(mostStreams: 1000), 1)
        #expect(stage.streams[1]?.count == 50 && stage.connecting == [])
    }

    /// A firewall, or a refused client certificate, which TLS 1.3 says after the handshake.
    @Test func `a connection that ends before SETTINGS has processed nothing`() {
        var stage = Stage()
        stage.add(1...5)
        stage.connect(mostStreams: nil)
        stage.write([1], 1)
        stage.pool.lost(1, .connectionLost, "alert certificate expired", at: stage.now)
        stage.work()
        let failures = stage.outcomes.compactMap { outcome in
            if case .unanswered(let failure) = outcome.end { failure } else { nil }
        }
        #expect(failures.count == 5 && stage.outcomes.allSatisfy { $0.sends == 0 && $0.sentAt == nil })
        #expect(failures.allSatisfy { !$0.mayHaveArrived } && failures.count { $0.kind == .connect } == 1)
        #expect(failures.contains { $0.message.contains("alert certificate expired") })
        #expect(failures.count { $0.kind == .backingOff } == 4 && stage.connecting.isEmpty)
    }

    @Test func `after a loss, connections begin with few streams, and get more with answers`() {
        var stage = Stage.proven(requests: 900)
        stage.write((1...200).map { Int32($0) * 2 + 1 }, 1)
        stage.pool.lost(1, .connectionLost, "reset", at: stage.now)
        stage.streams[1] = nil
        stage.work()
        let number = stage.connect()
        var stream: Int32 = 1
        func answer(_ count: Int) {
            for _ in 0..<count {
                stage.write([stream], number)
                stage.streams[number]?[stream] = nil
                stage.answer(stream, number)
                stream += 2
            }
        }
        answer(1)
        #expect(stage.streams[number]?.count == 10)
        answer(99)
        #expect(stage.streams[number]?.count == 20)
        answer(200)
        #expect(stage.streams[number]?.count == 40)
    }

    @Test func `the time of a response counts from the last send`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3, 5], 1)
        stage.now += .seconds(2)
        stage.tell(.closed(3, code: 2), 1)
        #expect(stage.streams[1]?[7]?.slot == 2, "it is sent again")
        stage.write([7], 1)
        stage.now += .seconds(1)
        stage.answer(7, 1)
        #expect(stage.outcomes.last?.responseTime == .seconds(1))
        stage.tell(.closed(5, code: 2), 1)
        stage.write([9], 1)
        stage.tell(.closed(9, code: 2), 1)
        #expect(stage.outcomes.count == 3 && stage.outcomes.last?.responseTime == nil, "no response")
    }

    @Test(arguments: ["ExpiredProviderToken", "InvalidProviderToken", "MissingProviderToken", "UnrelatedKeyIdInToken"])
    func `a refusal of the sender opens no second stream`(_ reason: String) {
        var stage = Stage()
        stage.add(1...50)
        stage.connect()
        stage.write([1], 1)
        stage.answer(1, 1, 403, reason: reason)
        #expect(stage.pool.inFlight == (reason == "UnrelatedKeyIdInToken" ? 0 : 1))
    }

    @Test func `another connection is opened when the streams of the first are used, and no more than allowed`() {
        var stage = Stage()
        stage.add(1...50)
        stage.connect(mostStreams: 3)
        stage.write([1], 1)
        stage.answer(1, 1)
        #expect(stage.pool.inFlight == 3 && stage.connecting == [2])
        stage.connect(mostStreams: 3)
        #expect(stage.streams[2]?.count == 1, "it has not answered")
        stage.write([1], 2)
        stage.answer(1, 2)
        #expect(stage.pool.inFlight == 6 && stage.connecting == [])
    }

    @Test func `no more requests are in flight than allowed, and a slow line gets no second connection`() {
        #expect(Stage.proven(inFlight: 5, requests: 50).pool.inFlight == 5)
        var slow = Stage()
        var big = request()
        big.payload = [UInt8](repeating: 0x20, count: 4096)
        for _ in 1...100 { slow.pool.add(Delivery(big)) }
        slow.work()
        slow.connect()
        slow.write([1], 1)
        slow.answer(1, 1)
        #expect(slow.pool.inFlight == 31 && slow.connecting == [], "128 KiB that nobody has taken")
        slow.write([3, 5], 1)
        slow.work()
        #expect(slow.pool.inFlight == 33)
    }

    // GOAWAY ----------------------------------------------------------------------------------------------------------

    @Test func `requests that GOAWAY refuses are sent on another connection at once, and cost no send`() {
        var stage = Stage.proven()
        stage.write([3, 5, 7], 1)
        stage.tell(.goAway(last: 5, PushGoAway(code: 0)), 1)
        #expect(stage.connecting == [2], "before the old one has ended")
        for stream in [7, 9, 11, 13, 15, 17, 19] as [Int32] { stage.tell(.closed(stream, code: 7), 1) }
        #expect(stage.outcomes.count == 1)
        stage.connect()
        stage.answer(3, 1)
        stage.answer(5, 1)
        #expect(stage.closed == [1])
        stage.write([1], 2)
        stage.answer(1, 2)
        for stream in [3, 5, 7, 9, 11, 13] as [Int32] {
            stage.write([stream], 2)
            stage.answer(stream, 2)
        }
        #expect(stage.outcomes.count == 10 && stage.outcomes.allSatisfy { $0.sends == 1 && $0.sentAt != nil })
    }

    @Test func `an idle connection that gets GOAWAY is closed and not replaced`() {
        var stage = Stage.proven(requests: 1)
        stage.tell(.goAway(last: .max, PushGoAway(code: 0)), 1)
        #expect(stage.closed == [1] && stage.connecting == [])
    }

    @Test func `GOAWAY with the greatest id refuses no request, but ends new streams`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3, 5], 1)
        stage.tell(.goAway(last: .max, PushGoAway(code: 0)), 1)
        #expect(stage.connecting == [2] && stage.pool.inFlight == 2)
        stage.answer(3, 1)
        stage.answer(5, 1)
        #expect(stage.outcomes.count == 3 && stage.closed == [1])
    }

    @Test func `GOAWAY that blames the sender is a fault until another connection gets an answer`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3, 5], 1)
        stage.tell(.goAway(last: 5, PushGoAway(code: 0, text: #"{"reason":"Shutdown"}"#)), 1)
        #expect(stage.pool.fault == nil, "the server's own reason")
        let goAway = PushGoAway(code: 0, text: #"{"reason":"BadCertificate"}"#)
        stage.tell(.goAway(last: 5, goAway), 1)
        stage.tell(.goAway(last: 3, goAway), 1)
        stage.answer(3, 1)
        #expect(stage.pool.fault == PushFault(goAway, count: 2))
        stage.tell(.closed(5, code: 7), 1)
        stage.connect()
        stage.write([1], 2)
        stage.answer(1, 2)
        #expect(stage.pool.fault == PushFault(goAway, count: 2, isCurrent: false))
    }

    @Test(
        arguments: [
            (0, nil, false), (2, nil, false), (1, nil, true), (11, nil, true), (0, "draining", false),
            (0, #"{"reason":"BadCertificate"}"#, true), (0, #"{"reason":"NewWord"}"#, true),
            (0, #"{"reason":"Shutdown"}"#, false), (0, #"{"reason":"IdleTimeout"}"#, false),
            (2, #"{"reason":"InternalServerError"}"#, false), (11, #"{"reason":"ServiceUnavailable"}"#, false),
        ] as [(UInt32, String?, Bool)])
    func `GOAWAY blames the sender with a reason that is not the server's own, or else with its error code`(
        code: UInt32, text: String?, blames: Bool
    ) {
        #expect(PushGoAway(code: code, text: text).blamesSender == blames)
    }

    @Test func `a loss after GOAWAY reports the server's reason`() throws {
        var stage = Stage.proven(requests: 2)
        stage.write([3], 1)
        stage.tell(.goAway(last: 3, PushGoAway(code: 11, text: #"{"reason":"Shutdown"}"#)), 1)
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        stage.connect()
        stage.write([1], 2)
        stage.pool.lost(2, .connectionLost, "closed", at: stage.now)
        stage.work()
        let failure = try #require(
            stage.outcomes.last.flatMap { if case .unanswered(let it) = $0.end { it } else { nil } })
        #expect(failure.mayHaveArrived && stage.outcomes.last?.sends == 2)
        var other = Stage.proven(requests: 1)
        other.pool.add(Delivery(PushRequest.onlyOnce))
        other.work()
        other.write([3], 1)
        other.tell(.goAway(last: 3, PushGoAway(code: 11, text: #"{"reason":"Shutdown"}"#)), 1)
        other.pool.lost(1, .connectionLost, "closed", at: other.now)
        other.work()
        let message = #"closed after GOAWAY ENHANCE_YOUR_CALM {"reason":"Shutdown"}"#
        #expect(
            other.outcomes.last?.end
                == .unanswered(PushFailure(kind: .connectionLost, message: message, mayHaveArrived: true)))
    }

    // Refusals --------------------------------------------------------------------------------------------------------

    @Test
    func `requests refused by REFUSED_STREAM move to another connection, and theirs pauses with exponential backoff`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3, 5], 1)
        stage.tell(.closed(3, code: 7), 1)
        stage.tell(.closed(5, code: 7), 1)
        #expect(stage.connecting == [2] && stage.outcomes.count == 1)
        stage.connect()
        stage.write([1], 2)
        stage.answer(1, 2)
        stage.write([3], 2)
        stage.answer(3, 2)
        #expect(stage.outcomes.count == 3 && stage.outcomes.allSatisfy { $0.sends == 1 })
    }

    @Test func `the client backs off from a server after three refusals`() {
        var stage = Stage()
        stage.add(1...100)
        stage.connect()
        var asked = 0
        for _ in 1...1000 where stage.outcomes.isEmpty {
            for (number, streams) in stage.streams {
                for stream in streams.keys {
                    asked += 1
                    stage.write([stream], number)
                    stage.streams[number]?[stream] = nil
                    stage.tell(.closed(stream, code: 7), number)
                }
            }
            if !stage.connecting.isEmpty { stage.connect() }
            stage.pass(.milliseconds(20))
        }
        #expect(asked == 3 && stage.pool.opened == 2)
        #expect(stage.outcomes.count == 100)
        for outcome in stage.outcomes {
            guard case .unanswered(let failure) = outcome.end else {
                Issue.record("\(outcome.end)")
                continue
            }
            #expect(
                failure.kind == .backingOff && !failure.mayHaveArrived && outcome.sends == 0 && outcome.sentAt == nil)
        }
    }

    @Test func `the client backs off from a server that sends GOAWAY on every connection`() {
        var stage = Stage()
        stage.add(1...100)
        for _ in 1...1000 where stage.outcomes.isEmpty {
            guard !stage.connecting.isEmpty else {
                stage.pass(.milliseconds(20))
                continue
            }
            let number = stage.connect()
            stage.write([1], number)
            stage.tell(.goAway(last: 0, PushGoAway(code: 0)), number)
            stage.tell(.closed(1, code: 7), number)
        }
        #expect(stage.pool.opened == 4 && stage.outcomes.count == 100, "the fourth was begun before the third failed")
        #expect(stage.outcomes.allSatisfy { $0.sends == 0 })
    }

    @Test func `the client does not back off from a server that answers on each connection before GOAWAY`() {
        var stage = Stage()
        stage.add(1...200)
        for _ in 1...50 {
            let number = stage.connect()
            stage.write([1], number)
            stage.answer(1, number)
            stage.write([3, 5, 7], number)
            stage.tell(.goAway(last: 5, PushGoAway(code: 0)), number)
            for stream in stage.streams[number, default: [:]].keys.filter({ $0 > 5 }).sorted() {
                stage.tell(.closed(stream, code: 7), number)
            }
            stage.answer(3, number)
            stage.answer(5, number)
        }
        #expect(stage.outcomes.count == 150 && stage.outcomes.allSatisfy { $0.sends == 1 })
    }

    @Test func `while a server restarts, answers on old connections lead to no more attempts to connect`() {
        var stage = Stage.proven(requests: 20)
        let streams = stage.streams[1, default: [:]].keys.filter { $0 > 1 }.sorted()
        stage.write(streams, 1)
        stage.tell(.goAway(last: Int32.max, PushGoAway(code: 0)), 1)
        var attempts = 0
        for stream in streams {
            stage.add(100 + Int(stream)...100 + Int(stream))
            stage.answer(stream, 1)
            attempts += stage.connecting.count
            for number in stage.connecting { stage.pool.couldNotConnect(number, .connect, "refused", at: stage.now) }
            stage.connecting = []
            stage.pass(.milliseconds(20))
        }
        // At once, after 188 to 250 ms and after 375 to 500 ms more, within 380 ms.
        #expect((2...3).contains(attempts), "\(attempts)")
    }

    // Losses ----------------------------------------------------------------------------------------------------------

    @Test func `a request that TLS has not taken counts as unsent, whatever happens to its connection`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3], 1)
        stage.pool.lost(1, .connectionLost, "reset", at: stage.now)
        stage.work()
        stage.connect()
        stage.write([1], 2)
        stage.answer(1, 2)
        stage.write([3], 2)
        stage.answer(3, 2)
        #expect(stage.outcomes.map(\.sends).sorted() == [1, 1, 2])
    }

    @Test func `the headers of a 200 complete a request; other answers need END_STREAM`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3, 5], 1)
        stage.tell(.head(3, PushResponse(status: 200)), 1)
        #expect(stage.outcomes.count == 2)
        stage.tell(.head(5, PushResponse(status: 410)), 1)
        stage.tell(.closed(3, code: 2), 1)
        stage.tell(.closed(5, code: 0), 1)
        #expect(stage.outcomes.count == 2, "the 410 has no end: the request goes again")
        stage.write([7], 1)
        stage.answer(7, 1, 410, reason: "Unregistered")
        #expect(stage.outcomes.last?.sends == 2 && stage.outcomes.count == 3)
    }

    @Test func `an answer that precedes the end of its request ends the request, and the rest is not written`() {
        var stage = Stage.proven(requests: 2)
        stage.tell(.answer(3, PushResponse(status: 413)), 1)
        #expect(stage.resets == [3] && stage.outcomes.last?.sends == 1)
    }

    @Test func `the client backs off from a server that hangs up three times without an answer`() {
        var stage = Stage()
        stage.add(1...100)
        for _ in 1...20 where !stage.connecting.isEmpty {
            let number = stage.connect()
            stage.write([1], number)
            stage.pool.lost(number, .connectionLost, "closed", at: stage.now)
            stage.work()
        }
        #expect(stage.pool.opened == 3 && stage.outcomes.count == 100)
        #expect(stage.outcomes.map(\.sends).sorted().suffix(4) == [0, 1, 1, 1], "each connection had another request")
    }

    @Test func `a request that never gets a response is not the first on the next connection`() {
        var stage = Stage()
        stage.add(1...10)
        stage.connect()
        stage.write([1], 1)
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        stage.connect()
        #expect(stage.streams[2]?[1]?.slot == 2)
        stage.write([1], 2)
        stage.answer(1, 2)
        #expect(stage.streams[2]?.values.contains { $0.slot == 1 } == true)
    }

    @Test func `requests that never get a response do not condemn a connection that answers others`() {
        let start = ContinuousClock.now
        var state = ConnectionState(1, at: start)
        state.opened(at: start)
        state.settings(mostStreams: 1000)
        for stream: Int32 in [1, 3, 5, 7, 9] {
            state.began(Delivery(request(Int(stream), slot: Int(stream))), on: stream, at: start)
            state.wrote(stream, at: start, .now)
        }
        let answer = PushResponse(status: 200, body: nil, apnsID: "id")
        #expect(state.answer(answer, on: 9, at: start + .seconds(20), .now) != nil)
        #expect(state.overdue(after: .seconds(30), at: start + .seconds(31)).count == 4)
        #expect(!state.isOfNoUse && !state.hasNotAnswered(for: .seconds(30), at: start + .seconds(31)))
    }

    @Test func `what was never sent goes first on a connection that has not answered`() {
        var stage = Stage.proven(requests: 6)
        stage.write([3, 5, 7, 9, 11], 1)
        stage.pass(.seconds(31))
        stage.add(7...9)
        #expect(stage.closed == [1])
        let next = stage.connect()
        #expect(stage.streams[next]?.values.map(\.slot) == [7])
        stage.write([1], next)
        stage.answer(1, next)
        #expect(stage.streams[next]?.count == 8)
    }

    @Test func `a request that the server refuses again and again ends, and did not arrive`() {
        var stage = Stage.proven(requests: 2)
        stage.write([3], 1)
        for tries in 1...5 {
            #expect(stage.outcomes.count == 1)
            stage.write([Int32(2 * tries + 1)], 1)
            stage.tell(.closed(Int32(2 * tries + 1), code: HTTP2Error.refusedStream), 1)
            stage.pass(.seconds(60))
            stage.pool.heard(1, at: stage.now)
        }
        guard case .unanswered(let failure)? = stage.outcomes.last?.end else {
            Issue.record("\(stage.outcomes)")
            return
        }
        #expect(failure.kind == .connectionLost && !failure.mayHaveArrived && stage.outcomes.last?.sends == 0)
    }

    @Test func `a failed connection ends no request while another one works`() {
        var stage = Stage()
        stage.add(1...5)
        stage.connect(mostStreams: 1)
        stage.write([1], 1)
        stage.answer(1, 1)
        #expect(stage.connecting == [2])
        stage.pool.couldNotConnect(2, .connect, "refused", at: stage.now)
        stage.work()
        #expect(stage.outcomes.count == 1 && stage.pool.inFlight == 1)
    }

    // Time ------------------------------------------------------------------------------------------------------------

    @Test func `the time limit for an answer starts when the request is written`() {
        var stage = Stage.proven(requests: 3)
        stage.pass(.seconds(20))
        stage.pool.heard(1, at: stage.now)
        stage.write([3, 5], 1)
        stage.pass(.seconds(20))
        stage.pool.heard(1, at: stage.now)
        #expect(stage.resets == [])
        stage.tell(.head(5, PushResponse(status: 400)), 1)
        stage.pass(.seconds(11))
        #expect(stage.resets.sorted() == [3, 5] && stage.closed == [])
        #expect(stage.pool.inFlight == 2, "both go again")
    }

    @Test func `the stream of a 200 that does not end is reset, once, after the time limit`() {
        var stage = Stage.proven(requests: 2)
        stage.write([3], 1)
        stage.tell(.head(3, PushResponse(status: 200)), 1)
        #expect(stage.outcomes.count == 2 && stage.pool.inFlight == 0)
        stage.pass(.seconds(30))
        #expect(stage.resets == [])
        for _ in 1...2 {
            stage.pass(.seconds(31))
            stage.pool.heard(1, at: stage.now)
        }
        #expect(stage.resets == [3] && stage.closed == [])
    }

    @Test func `a request held back by flow control moves to another connection, and costs no send`() {
        var stage = Stage.proven(requests: 2)
        stage.pass(.seconds(20))
        stage.pool.heard(1, at: stage.now)
        stage.pass(.seconds(11))
        #expect(stage.resets == [3] && stage.connecting == [2] && stage.outcomes.count == 1)
    }

    @Test func `a connection without answers is closed; a silent one gets a PING first`() {
        var stage = Stage.proven(requests: 2)
        stage.write([3], 1)
        stage.pass(.seconds(11))
        #expect(stage.pings == 1 && stage.closed == [])
        stage.pool.heard(1, at: stage.now)
        stage.pass(.seconds(20))
        #expect(stage.pings == 1 && stage.closed == [1])
        var dead = Stage.proven(requests: 2)
        dead.write([3], 1)
        dead.pass(.seconds(11))
        dead.pass(.seconds(11))
        #expect(dead.pings == 1 && dead.closed == [1], "nothing came after the PING")
    }

    @Test func `an idle connection gets a PING after an hour and stays open`() {
        var stage = Stage.proven(requests: 1)
        stage.pass(.seconds(3599))
        #expect(stage.pings == 0)
        stage.pass(.seconds(2))
        #expect(stage.pings == 1)
        stage.pool.heard(1, at: stage.now)
        stage.pass(.seconds(60))
        #expect(stage.closed == [] && stage.pings == 1)
    }

    @Test func `requests to a server that allows no stream end in time`() {
        var stage = Stage()
        stage.add(1...3)
        stage.connect(mostStreams: 0)
        stage.pass(.seconds(1))
        stage.pool.heard(1, at: stage.now)
        stage.pass(.seconds(31))
        #expect(stage.outcomes.count == 3 && stage.closed == [1])
    }

    @Test func `after a standstill no unsent request is sent, not even to replace a refused one`() {
        var stage = Stage.proven(requests: 5)
        stage.write([3, 5], 1)
        stage.pool.abandon(at: stage.now)
        stage.work()
        #expect(stage.resets == [7, 9] && stage.outcomes.count { $0.end == .withdrawn } == 2)
        stage.tell(.closed(3, code: 7), 1)
        #expect(stage.outcomes.count { $0.end == .withdrawn && $0.sends == 0 } == 3)
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        #expect(stage.outcomes.count == 5 && stage.connecting == [])
    }

    @Test func `after a standstill, a connection with unwritten bytes is closed`() {
        var stage = Stage.proven(requests: 3)
        stage.pool.wrote(1, ends: [3], isPending: true, hasMoved: true, at: stage.now, .now)
        stage.pool.abandon(at: stage.now)
        stage.work()
        #expect(stage.closed == [1])
        #expect(stage.outcomes.count { $0.end == .withdrawn } == 1 && stage.outcomes.count { $0.sends == 1 } == 2)
    }

    @Test func `when the time for a stop is over, unwritten requests are returned and never sent`() {
        var stage = Stage.proven(requests: 3)
        stage.pool.wrote(1, ends: [3], isPending: true, hasMoved: true, at: stage.now, .now)
        stage.pool.endAll(at: stage.now)
        stage.work()
        #expect(stage.closed == [1] && stage.outcomes.count == 3)
        #expect(stage.outcomes.count { $0.end == .withdrawn } == 1)
    }

    @Test func `a request stuck in the output moves to another connection only after its own is closed`() {
        var stage = Stage.proven(requests: 2)
        for _ in 1...3 {
            // A few bytes move now and then, and the server is there.
            stage.pass(.seconds(8))
            stage.pool.heard(1, at: stage.now)
            stage.pool.wrote(1, ends: [], isPending: true, hasMoved: true, at: stage.now, .now)
            #expect(stage.resets == [])
        }
        #expect(stage.closed == [] && stage.connecting == [])
        stage.pass(.seconds(7))
        #expect(stage.closed == [1] && stage.connecting == [2] && stage.outcomes.count == 1)
        stage.connect()
        stage.write([1], 2)
        stage.answer(1, 2)
        #expect(stage.outcomes.last?.sends == 1)
    }

    @Test func `a stop withdraws unwritten requests, unless some of their bytes have left`() {
        var stage = Stage.proven(requests: 3)
        stage.pool.wrote(1, ends: [3], isPending: true, hasMoved: true, at: stage.now, .now)
        stage.pool.stop()
        stage.work()
        #expect(stage.outcomes.count == 1)
        stage.pool.wrote(1, ends: [5], isPending: false, hasMoved: true, at: stage.now, .now)
        stage.answer(5, 1)
        stage.pool.endAll(at: stage.now)
        stage.work()
        #expect(stage.outcomes.count == 3 && stage.outcomes.count { $0.end == .withdrawn } == 0)
    }

    // Taking back ------------------------------------------------------------------------------------------------------

    @Test func `a withdrawal ends what waits and what is not whole, and nothing else is sent a second time`() {
        var stage = Stage.proven(inFlight: 4, requests: 7)
        // Streams 3, 5, 7 and 9 have the requests 2 to 5. Requests 6 and 7 wait.
        stage.write([3, 5], 1)
        stage.pool.withdraw([2, 4, 6])
        stage.work()
        #expect(stage.resets == [7])
        #expect(stage.outcomes.dropFirst().map(\.request.slot) == [6, 4])
        #expect(stage.outcomes.dropFirst().allSatisfy { $0.end == .withdrawn && $0.sends == 0 && $0.sentAt == nil })
        #expect(stage.streams[1]?.count == 6, "request 7 has the stream that was free")
        stage.tell(.closed(3, code: 7), 1)
        #expect(stage.outcomes.last?.request.slot == 2 && stage.outcomes.last?.end == .withdrawn, "refused")
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        stage.connect()
        stage.write([1], 2)
        stage.answer(1, 2)
        #expect(
            Set(stage.streams[2]?.values.map(\.slot) ?? []) == [3, 5, 7], "they were not withdrawn, and are sent again")
        #expect(stage.outcomes.count == 5)
    }

    @Test func `what waits can be taken back alone, and what was sent is repeated`() {
        var stage = Stage.proven(inFlight: 4, requests: 7)
        stage.write([3, 5, 7, 9], 1)
        stage.pool.withdrawUnsent([2, 4, 6, 7])
        stage.work()
        #expect(stage.resets.isEmpty && stage.outcomes.dropFirst().map(\.request.slot) == [6, 7])
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        stage.connect()
        stage.write([1], 2)
        stage.answer(1, 2)
        #expect(Set(stage.streams[2]?.values.map(\.slot) ?? []) == [2, 3, 4, 5])
    }

    @Test func `a request that was sent and withdrawn ends with its response, or without a second send`() {
        var stage = Stage.proven(requests: 3)
        stage.write([3, 5], 1)
        stage.pool.withdraw([2, 3])
        stage.work()
        #expect(stage.outcomes.count == 1 && stage.resets == [])
        stage.answer(3, 1, 410, reason: "Unregistered")
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        #expect(stage.connecting == [])
        #expect(stage.outcomes.map(\.sends) == [1, 1, 1])
        #expect(stage.outcomes.last?.request.slot == 3)
        guard case .unanswered(let failure)? = stage.outcomes.last?.end else {
            Issue.record("it was not answered")
            return
        }
        #expect(failure.mayHaveArrived)
    }

    @Test func `a withdrawal leaves a request of which some bytes may have left, and it is not repeated`() {
        var stage = Stage.proven(requests: 3)
        stage.pool.wrote(1, ends: [3], isPending: true, hasMoved: true, at: stage.now, .now)
        stage.pool.withdraw([2, 3])
        stage.work()
        #expect(stage.outcomes.count == 1 && stage.resets == [] && stage.closed == [])
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        #expect(stage.connecting == [] && stage.outcomes.map(\.sends) == [1, 1, 0])
        #expect(stage.outcomes.last?.end == .withdrawn)
    }

    @Test func `what no server has processed is reported as not sent, unless it was sent before`() throws {
        var stage = Stage.proven(requests: 4)
        stage.write([3, 5], 1)
        stage.tell(.closed(3, code: 7), 1)
        #expect(stage.unsent == [2], "refused")
        stage.pool.lost(1, .connectionLost, "closed", at: stage.now)
        stage.work()
        #expect(stage.unsent == [2, 4], "4 was never written, 3 was")
        stage.connect()
        let first = try #require(stage.streams[2]?[1])
        stage.write([1], 2)
        stage.answer(1, 2)
        let again = try #require(stage.streams[2]?.first { $0.value.slot == 3 })
        try #require(first.slot != 3, "3 is refused below")
        stage.write([again.key], 2)
        stage.tell(.closed(again.key, code: 7), 2)
        #expect(stage.unsent == [2, 4], "3 was sent before, so it may have been processed")
    }
}

extension PushRequest {
    fileprivate static var onlyOnce: PushRequest {
        var once = request(77)
        once.mayBeRepeated = false
        return once
    }
}
