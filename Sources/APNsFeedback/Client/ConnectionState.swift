internal import TokenModel

/// One connection, as far as its requests are concerned: decides how each attempt to send a request ends, how many more requests the
/// connection may take, and when it can be closed. Pure: `ConnectionPool` reports what happens.
///
/// The rules: RFC 9113, 5.1, 6.8 and 8.7; Apple, "Establishing a token-based connection to APNs".
struct ConnectionState {
    enum Phase: Equatable {
        /// The TLS handshake is not complete.
        case connecting
        case open
        /// Takes no more requests: the server sent GOAWAY, or refuses the sender's key on this connection.
        case draining
    }

    /// How one attempt to send a request ended.
    enum Ending {
        case turn(Delivery, Delivery.Turn)
        /// The server did not process the request. It can be sent again, and this attempt does not count as a send.
        case refused(Delivery)
    }

    private struct Stream {
        /// Nil once the request is settled. The stream stays until the server or a reset closes it.
        private(set) var delivery: Delivery?
        let openedAt: ContinuousClock.Instant
        /// When TLS took the end of the request, or the response began.
        private(set) var writtenAt: ContinuousClock.Instant?
        /// Whether TLS has taken the end of the request. The server may respond before that.
        var isWhole = false
        /// When the request was settled; nil before, and once the stream is to be reset.
        var settledAt: ContinuousClock.Instant?
        /// Whether the head of a response has arrived.
        var hasHead = false
        /// The request's size in bytes, estimated.
        let size: Int

        init(_ delivery: Delivery, size: Int, at now: ContinuousClock.Instant) {
            (self.delivery, self.size, openedAt) = (delivery, size, now)
        }

        /// Counts the send, unless it is already counted.
        ///
        /// - Returns: How many bytes no longer count as unwritten.
        mutating func countSend(at now: ContinuousClock.Instant, _ time: Instant) -> Int {
            if writtenAt != nil { return 0 }
            writtenAt = now
            delivery?.goes(at: time)
            return size
        }

        /// Settles the request.
        ///
        /// - Returns: The request, and how many of its bytes were still unwritten. Nil if it was already settled.
        mutating func settle() -> (delivery: Delivery, unwritten: Int)? {
            delivery.take().map { ($0, writtenAt == nil ? size : 0) }
        }

        mutating func repeatNoMore() { delivery?.repeatNoMore() }
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
    /// Errors of the server, refusals of the sender, and requests without a response.
    private var errorsInARow = 0
    private(set) var restsUntil: ContinuousClock.Instant?
    var quiet: Silence

    /// The unwritten bytes at which the connection takes no more requests. On a slow line, requests wait in the pool's queue instead,
    /// from which another connection can take them.
    static let mostUnwritten = 128 << 10
    /// APNs allows 1000.
    static let mostStreamsEver = 1000
    /// How many streams it may have now: few after a connection was lost with requests unanswered, and twice as many each time that ten times
    /// their number were answered. A server that loses its connections then loses few requests.
    private(set) var window: Int
    private var answersInWindow = 0
    /// With how many streams the next connection begins: ten after the first loss, half as many after more, and two at least.
    var windowAfterLoss: Int { max(min(window / 2, 10), 2) }

    init(_ number: Int, window: Int = ConnectionState.mostStreamsEver, at now: ContinuousClock.Instant) {
        self.number = number
        self.window = window
        quiet = Silence(at: now)
    }

    // MARK: - More requests

    /// How many streams may be open. Until the server has accepted the sender, APNs allows one. After a refusal, too, one request at a
    /// time tests whether the server accepts requests again.
    private var limit: Int { min(mostStreams ?? 1, isProven ? window : 1) }

    func isResting(at now: ContinuousClock.Instant) -> Bool { restsUntil.map { $0 > now } ?? false }

    func hasRoom(at now: ContinuousClock.Instant) -> Bool {
        phase == .open && streams.count < limit && unwritten < Self.mostUnwritten && !isResting(at: now)
    }

    /// Whether the first request has got no answer for so long that the others should not wait for it.
    func isMute(at now: ContinuousClock.Instant) -> Bool {
        !isProven && streams.values.contains { $0.delivery != nil && now - $0.openedAt >= Self.firstAnswer }
    }

    /// APNs may never respond to a request (pushy#816). A first response takes less.
    static let firstAnswer: Duration = .seconds(2)

    /// Whether the last few answers were errors of the server: another connection may lead to another one (pushy#408, node-apn#463).
    var isOfNoUse: Bool { phase == .open && errorsInARow >= Self.mostErrors }

    private static let mostErrors = 3

    /// Whether the next request is the first, or tests the connection alone.
    var isOnTrial: Bool { !isProven }

    /// Whether all streams are used, so that another connection would help.
    var isFull: Bool { isProven && mostStreams != nil && streams.count >= limit }

    /// Whether it can be closed: it takes no more requests, and all that it had are settled.
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
        streams[stream] = Stream(delivery, size: size, at: now)
        requests += 1
        unwritten += size
        quiet.asked(at: now)
    }

    /// TLS has taken the end of a request.
    mutating func wrote(_ stream: Int32, at now: ContinuousClock.Instant, _ time: Instant) {
        guard let place = streams.index(forKey: stream) else { return }
        streams.values[place].isWhole = true
        unwritten -= streams.values[place].countSend(at: now, time)
    }

    /// Whether TLS has taken all of a request.
    func isWhole(_ stream: Int32) -> Bool { streams[stream]?.isWhole ?? true }

    /// The head of a 200 settles the request, whatever follows. Any other response counts when it is complete.
    mutating func head(_ answer: PushResponse, on stream: Int32, at now: ContinuousClock.Instant, _ time: Instant)
        -> Ending?
    {
        if answer.status == 200 { return self.answer(answer, on: stream, at: now, time) }
        answered(at: now)
        guard let place = streams.index(forKey: stream) else { return nil }
        unwritten -= streams.values[place].countSend(at: now, time)
        streams.values[place].hasHead = true
        return nil
    }

    mutating func answer(_ answer: PushResponse, on stream: Int32, at now: ContinuousClock.Instant, _ time: Instant)
        -> Ending?
    {
        answered(at: now)
        let text = answer.status == 200 ? nil : ResponseBody(answer.body).reason
        let reason = answer.status == 200 ? nil : Reason(status: answer.status, text)
        if reason != .credential {
            isProven = true
            refusals.reset()
        }
        // Another connection may reach another server, or go past whatever answers in its place.
        let isError =
            reason.map { [.permission, .credential, .sender, .idle, .server].contains($0) } ?? false
            || answer.status != 200 && !Interpretation.isOfAPNs(answer)
        // Each access by the key copies the stream, so a look-up has to do for all.
        let place = streams.index(forKey: stream)
        if let place { unwritten -= streams.values[place].countSend(at: now, time) }
        let taken = place.flatMap { take(at: $0) }
        // After Shutdown, the server takes no more. A request that comes again should find another connection.
        let weight = text == "Shutdown" ? Self.mostErrors : taken?.request.mayBeRepeated == false ? 2 : 1
        errorsInARow = isError ? errorsInARow + weight : 0
        guard let place, var delivery = taken else { return nil }
        streams.values[place].settledAt = now
        if let writtenAt = streams.values[place].writtenAt { delivery.wasAnswered(after: now - writtenAt) }
        return .turn(delivery, .answer(answer))
    }

    private mutating func answered(at now: ContinuousClock.Instant) {
        hasAnswered = true
        quiet.answered(at: now)
        if window == Self.mostStreamsEver { return }
        answersInWindow += 1
        if answersInWindow >= window * 10 { (window, answersInWindow) = (min(window * 2, Self.mostStreamsEver), 0) }
    }

    /// A stream has ended.
    mutating func closed(_ stream: Int32, code: UInt32, at now: ContinuousClock.Instant) -> Ending? {
        let delivery = take(stream)
        guard let ended = streams.removeValue(forKey: stream), var delivery else { return nil }
        if !ended.hasHead, ended.writtenAt == nil || code == HTTP2Error.refusedStream {
            // What GOAWAY refused says nothing about streams before it.
            let isByGoAway = stream > lastStream || phase != .open
            if ended.writtenAt != nil { delivery.wasRefused(byGoAway: isByGoAway) }
            if !isByGoAway { rest(at: now) }
            return .refused(delivery)
        }
        let why = ended.hasHead ? "the end of the response is missing" : "the stream was reset"
        return .turn(delivery, failure(.connectionLost, "\(why): \(HTTP2Error.name(code))"))
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

    /// Whether the server has spoken HTTP/2. Its first frame is SETTINGS (RFC 9113, 3.4). Without it, no server has processed a request: a firewall has
    /// ended the connection, or the server has refused the client's certificate, which TLS 1.3 says after the handshake.
    var hasSpoken: Bool { mostStreams != nil }

    /// How many requests were sent and not answered.
    var unanswered: Int { streams.values.count { $0.delivery != nil && $0.writtenAt != nil } }

    /// The connection is gone.
    mutating func lost(_ kind: PushFailure.Kind, _ message: String) -> [Ending] {
        phase = .draining
        return streams.keys.sorted().compactMap { stream in
            let wasWritten = streams[stream]?.writtenAt != nil
            guard var delivery = take(stream) else { return nil }
            streams[stream] = nil
            if !wasWritten { return .refused(delivery) }
            if hasSpoken { return .turn(delivery, failure(kind, message)) }
            delivery.wasRefused(byGoAway: true)
            return .refused(delivery)
        }
    }

    /// The failure of an attempt in which the request was sent. Names the GOAWAY, if one came: it may say why.
    private func failure(_ kind: PushFailure.Kind, _ message: String) -> Delivery.Turn {
        let message = goAway.map { "\(message) after \($0.message)" } ?? message
        return .failure(kind, message: message, wasSent: true)
    }

    /// Takes the request from its stream, which stays open until the server or a reset closes it.
    private mutating func take(_ stream: Int32) -> Delivery? {
        streams.index(forKey: stream).flatMap { take(at: $0) }
    }

    private mutating func take(at place: Dictionary<Int32, Stream>.Index) -> Delivery? {
        guard let settled = streams.values[place].settle() else { return nil }
        requests -= 1
        unwritten -= settled.unwritten
        return settled.delivery
    }

    // MARK: - Time

    /// Settles the requests that take too long: those without a response, and those that the server's flow control holds up. Their
    /// streams are to be reset. While the output holds bytes, one of them may be part of an unwritten request, so those stay: see
    /// `cannotWrite`.
    mutating func overdue(after limit: Duration, at now: ContinuousClock.Instant) -> [(stream: Int32, ending: Ending)] {
        let late = streams.filter { _, stream in
            stream.delivery != nil && (stream.writtenAt != nil || !quiet.isPending)
                && now - (stream.writtenAt ?? stream.openedAt) > limit
        }
        // What a connection answers meanwhile speaks for it: then the requests are odd (node-apn#463). Those that are late together count once.
        if late.values.contains(where: { $0.writtenAt.map { quiet.answeredAt <= $0 } ?? false }) { errorsInARow += 1 }
        return late.keys.sorted().compactMap { stream in
            let wasWritten = streams[stream]?.writtenAt != nil
            guard let delivery = take(stream) else { return nil }
            if !wasWritten { rest(at: now) }
            let turn = Delivery.Turn.failure(.timeout, message: "no response within \(limit)", wasSent: true)
            return (stream, wasWritten ? .turn(delivery, turn) : .refused(delivery))
        }
    }

    /// The streams of requests that were settled long ago: the server does not end its response. They are to be reset.
    mutating func lingering(after limit: Duration, at now: ContinuousClock.Instant) -> [Int32] {
        let late = streams.filter { _, stream in stream.settledAt.map { now - $0 > limit } ?? false }.keys.sorted()
        for stream in late { streams[stream]?.settledAt = nil }
        return late
    }

    /// Whether the output has held a part of a request for too long. Only after the connection is closed may another one send the
    /// request.
    func cannotWrite(for limit: Duration, at now: ContinuousClock.Instant) -> Bool {
        quiet.isPending
            && streams.values.contains { $0.delivery != nil && $0.writtenAt == nil && now - $0.openedAt > limit }
    }

    /// Whether a request has waited longer than `limit`, and nothing was answered since it was sent: then the connection is dead.
    func hasNotAnswered(for limit: Duration, at now: ContinuousClock.Instant) -> Bool {
        streams.values.contains { stream in
            guard stream.delivery != nil, let writtenAt = stream.writtenAt else { return false }
            return now - writtenAt > limit && quiet.answeredAt <= writtenAt
        }
    }

    /// Takes back the requests of which TLS has not taken the end. Their streams are to be reset.
    mutating func takeUnwritten(
        where isMeant: (Delivery) -> Bool = { _ in true }
    ) -> [(stream: Int32, delivery: Delivery)] {
        streams.filter { $0.value.writtenAt == nil && $0.value.delivery.map(isMeant) == true }.keys.sorted()
            .compactMap { stream in take(stream).map { (stream, $0) } }
    }

    /// Takes back all requests.
    mutating func takeAll() -> [Delivery] { streams.keys.sorted().compactMap { take($0) } }

    /// Allows no more sends of the requests that meet the condition.
    mutating func repeatNoMore(where isMeant: (Delivery) -> Bool = { _ in true }) {
        for place in streams.values.indices where streams.values[place].delivery.map(isMeant) == true {
            streams.values[place].repeatNoMore()
        }
    }
}
