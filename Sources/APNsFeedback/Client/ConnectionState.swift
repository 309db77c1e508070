internal import TokenModel

/// A connection's requests and what the server has said: decides what came of each request, how many more may follow, and when the
/// connection is of no more use. Pure: `ConnectionPool` tells it what happens.
///
/// The rules: RFC 9113, 5.1, 6.8 and 8.7; Apple, "Establishing a token-based connection to APNs".
struct ConnectionState {
    enum Phase: Equatable {
        /// No TLS yet.
        case connecting
        case open
        /// No more requests: the server said GOAWAY, or refuses the sender's key on this connection.
        case draining
    }

    /// What came of a request in this turn.
    enum Ending {
        case turn(Delivery, Delivery.Turn)
        /// The server has not processed it: it can go again, as if it had never gone.
        case refused(Delivery)
    }

    private struct Stream {
        /// Nil once the request is settled and only the stream's end is awaited.
        var delivery: Delivery?
        var openedAt: ContinuousClock.Instant
        /// When TLS took the end of the request, or the response began.
        var writtenAt: ContinuousClock.Instant?
        /// Whether TLS has taken the end of the request. The server may respond before that.
        var isWhole = false
        var hasHead = false
        var size: Int
    }

    let number: Int
    private(set) var phase = Phase.connecting
    /// Whether the server has answered any request.
    private(set) var hasAnswered = false
    /// The server's GOAWAY, if one came.
    private(set) var goAway: PushGoAway?
    private var lastStream = Int32.max
    private var streams: [Int32: Stream] = [:]
    /// The number of requests that are not settled.
    private(set) var requests = 0
    /// The bytes of requests that TLS has not taken.
    private var unwritten = 0
    private var mostStreams: Int?
    /// Whether the server has accepted the sender, since the last refusal.
    private var isProven = false
    private var refusals = Backoff(from: .milliseconds(50), to: .seconds(10))
    private(set) var restsUntil: ContinuousClock.Instant?
    var quiet: Silence

    /// With so much unwritten, it gets no more: on a slow line, requests wait where they can still go elsewhere.
    static let mostUnwritten = 128 << 10
    /// APNs allows 1000.
    private static let mostStreamsEver = 1000

    init(_ number: Int, at now: ContinuousClock.Instant) {
        self.number = number
        quiet = Silence(at: now)
    }

    // MARK: - More requests

    /// How many streams may be open. Until the server has accepted the sender, APNs allows one; and a connection that has refused a
    /// request shows with one whether it takes requests again.
    private var limit: Int { min(mostStreams ?? 1, isProven ? Self.mostStreamsEver : 1) }

    func isResting(at now: ContinuousClock.Instant) -> Bool { restsUntil.map { $0 > now } ?? false }

    func hasRoom(at now: ContinuousClock.Instant) -> Bool {
        phase == .open && streams.count < limit && unwritten < Self.mostUnwritten && !isResting(at: now)
    }

    /// Whether all streams are used, so that another connection would help.
    var isFull: Bool { isProven && mostStreams != nil && streams.count >= limit }

    /// Whether it has ended its work.
    var isDone: Bool { phase == .draining && requests == 0 }

    mutating func opened(at now: ContinuousClock.Instant) {
        phase = .open
        quiet.heard(at: now)
    }

    mutating func settings(mostStreams: Int) {
        self.mostStreams = mostStreams
    }

    mutating func drain() {
        phase = .draining
    }

    // MARK: - What happens to requests

    mutating func began(_ delivery: Delivery, on stream: Int32, at now: ContinuousClock.Instant) {
        let size = delivery.request.payload.count + 256
        streams[stream] = Stream(delivery: delivery, openedAt: now, size: size)
        requests += 1
        unwritten += size
        quiet.asked(at: now)
    }

    /// TLS has taken the end of a request.
    mutating func wrote(_ stream: Int32, at now: ContinuousClock.Instant, _ time: Instant) {
        streams[stream]?.isWhole = true
        countSend(stream, at: now, time)
    }

    /// Whether TLS has taken all of a request.
    func isWhole(_ stream: Int32) -> Bool { streams[stream]?.isWhole ?? true }

    private mutating func countSend(_ stream: Int32, at now: ContinuousClock.Instant, _ time: Instant) {
        guard let place = streams.index(forKey: stream), streams.values[place].writtenAt == nil else { return }
        streams.values[place].writtenAt = now
        streams.values[place].delivery?.goes(at: time)
        unwritten -= streams.values[place].size
    }

    /// The head of a 200 settles the request, whatever follows. Any other response counts when it is complete.
    mutating func head(_ answer: PushResponse, on stream: Int32, at now: ContinuousClock.Instant, _ time: Instant)
        -> Ending?
    {
        if answer.status == 200 { return self.answer(answer, on: stream, at: now, time) }
        answered(at: now)
        countSend(stream, at: now, time)
        streams[stream]?.hasHead = true
        return nil
    }

    mutating func answer(_ answer: PushResponse, on stream: Int32, at now: ContinuousClock.Instant, _ time: Instant)
        -> Ending?
    {
        answered(at: now)
        if answer.status != 403 || !Self.tokenReasons.contains(ResponseBody(answer.body).reason ?? "") {
            isProven = true
            refusals.reset()
        }
        countSend(stream, at: now, time)
        return take(stream).map { .turn($0, .answer(answer)) }
    }

    private mutating func answered(at now: ContinuousClock.Instant) {
        hasAnswered = true
        quiet.answered(at: now)
    }

    /// After these reasons, APNs has not accepted the sender. Apple, "Handling notification responses from APNs".
    private static let tokenReasons: Set<String> = [
        "ExpiredProviderToken", "InvalidProviderToken", "MissingProviderToken", "UnrelatedKeyIdInToken",
        "BadEnvironmentKeyIdInToken", "BadEnvironmentKeyInToken",
    ]

    /// A stream has ended.
    mutating func closed(_ stream: Int32, code: UInt32, at now: ContinuousClock.Instant) -> Ending? {
        guard let place = streams.index(forKey: stream) else { return nil }
        let ended = streams.values[place]
        let delivery = take(stream)
        streams[stream] = nil
        guard var delivery else { return nil }
        if !ended.hasHead, ended.writtenAt == nil || code == HTTP2Error.refusedStream {
            if ended.writtenAt != nil { delivery.wasRefused() }
            // What GOAWAY refused says nothing about streams before it.
            if stream <= lastStream, phase == .open { rest(at: now) }
            return .refused(delivery)
        }
        let why = ended.hasHead ? "the end of the response is missing" : "the stream was reset"
        return .turn(delivery, failure("\(why): \(HTTP2Error.name(code))"))
    }

    private mutating func rest(at now: ContinuousClock.Instant) {
        isProven = false
        if !isResting(at: now) { restsUntil = now + refusals.next() }
    }

    /// The last stream id only shrinks: libnghttp2 makes sure of that.
    mutating func takes(_ goAway: PushGoAway, last: Int32) {
        phase = .draining
        lastStream = min(lastStream, last)
        // The first one may say nothing but that another one follows.
        if self.goAway == nil || goAway.code != HTTP2Error.noError || goAway.text != nil { self.goAway = goAway }
    }

    /// The connection is gone.
    mutating func lost(_ kind: PushFailure.Kind, _ message: String) -> [Ending] {
        phase = .draining
        let message = goAway.map { "\(message) after \($0.message)" } ?? message
        return streams.keys.sorted().compactMap { stream in
            let wasWritten = streams[stream]?.writtenAt != nil
            guard let delivery = take(stream) else { return nil }
            streams[stream] = nil
            return wasWritten ? .turn(delivery, .failure(kind, message: message, wasSent: true)) : .refused(delivery)
        }
    }

    private func failure(_ message: String) -> Delivery.Turn {
        let message = goAway.map { "\(message) after \($0.message)" } ?? message
        return .failure(.connectionLost, message: message, wasSent: true)
    }

    /// Takes the request from its stream, which stays open until the server or a reset closes it.
    private mutating func take(_ stream: Int32) -> Delivery? {
        guard let place = streams.index(forKey: stream), let delivery = streams.values[place].delivery else {
            return nil
        }
        streams.values[place].delivery = nil
        requests -= 1
        if streams.values[place].writtenAt == nil { unwritten -= streams.values[place].size }
        return delivery
    }

    // MARK: - Time

    /// The requests that take too long, to be reset: those without a response, and those that the server does not let through. A
    /// request of which the output holds a part cannot be taken back: see `cannotWrite`.
    mutating func overdue(after limit: Duration, at now: ContinuousClock.Instant) -> [(stream: Int32, ending: Ending)] {
        let late = streams.filter { _, stream in
            stream.delivery != nil && (stream.writtenAt != nil || !quiet.isPending)
                && now - (stream.writtenAt ?? stream.openedAt) > limit
        }
        return late.keys.sorted().compactMap { stream in
            let wasWritten = streams[stream]?.writtenAt != nil
            guard let delivery = take(stream) else { return nil }
            if !wasWritten { rest(at: now) }
            let turn = Delivery.Turn.failure(.timeout, message: "no response within \(limit)", wasSent: true)
            return (stream, wasWritten ? .turn(delivery, turn) : .refused(delivery))
        }
    }

    /// Whether the output has held a request for too long. The connection must go before another one may have
    /// the request.
    func cannotWrite(for limit: Duration, at now: ContinuousClock.Instant) -> Bool {
        quiet.isPending
            && streams.values.contains { $0.delivery != nil && $0.writtenAt == nil && now - $0.openedAt > limit }
    }

    /// Whether the oldest of the requests is older than the last answer: a connection on which nothing is answered is dead.
    func hasNotAnswered(for limit: Duration, at now: ContinuousClock.Instant) -> Bool {
        streams.values.contains { stream in
            guard stream.delivery != nil, let writtenAt = stream.writtenAt else { return false }
            return now - writtenAt > limit && quiet.answeredAt <= writtenAt
        }
    }

    /// Takes back the requests of which TLS has not taken the end, and their streams.
    mutating func takeUnwritten() -> [(stream: Int32, delivery: Delivery)] {
        streams.filter { $0.value.writtenAt == nil && $0.value.delivery != nil }.keys.sorted().compactMap { stream in
            take(stream).map { (stream, $0) }
        }
    }

    /// Takes back all requests.
    mutating func takeAll() -> [Delivery] { streams.keys.sorted().compactMap { take($0) } }

    mutating func repeatNoMore() {
        for place in streams.values.indices { streams.values[place].delivery?.repeatNoMore() }
    }
}
