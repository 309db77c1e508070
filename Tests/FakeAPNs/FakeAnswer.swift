import Synchronization

/// Holds answers until the test opens it: what a test does before happens before any of them arrives.
public final class FakeGate: Sendable {
    private struct State {
        var isOpen = false
        var held: [@Sendable () -> Void] = []
    }

    private let state = Mutex(State())

    public init() {}

    /// Lets all answers pass, those that are held and those that come later.
    public func open() {
        let held = state.withLock { state in
            state.isOpen = true
            defer { state.held = [] }
            return state.held
        }
        for pass in held { pass() }
    }

    /// - Parameter pass: Called once: at once, or by `open`.
    func whenOpen(_ pass: @escaping @Sendable () -> Void) {
        let isOpen = state.withLock { state in
            if !state.isOpen { state.held.append(pass) }
            return state.isOpen
        }
        if isOpen { pass() }
    }
}

/// What the server does with a valid request.
public struct FakeAnswer: Sendable {
    var action: Action
    var delay: Duration = .zero
    var gate: FakeGate?
    /// How its frames differ from the usual ones; nil, as for most answers, if they do not.
    var manner: Manner?
    /// SETTINGS that are sent before the answer.
    var settings: FakeSettings?

    enum Action: Sendable {
        case status(Int, reason: String?, timestamp: Int64?)
        case raw(Raw)
        case never
        case reset(code: Int)
        case goAway(GoAway)
        case close
    }

    /// Status 200.
    public static let accepted = FakeAnswer(action: .status(200, reason: nil, timestamp: nil))

    /// An error as Apple writes it: `{"reason":"…"}`, or `{"reason":"…","timestamp":…}`.
    ///
    /// - Parameter timestamp: Milliseconds since the Unix epoch. APNs sends it only with 410.
    public static func refused(_ status: Int, _ reason: String, timestamp: Int64? = nil) -> FakeAnswer {
        FakeAnswer(action: .status(status, reason: reason, timestamp: timestamp))
    }

    /// Status 410, reason `Unregistered`.
    public static func stale(at timestamp: Int64, reason: String = "Unregistered") -> FakeAnswer {
        refused(410, reason, timestamp: timestamp)
    }

    /// Any headers and any bytes, also those that APNs never sends.
    public static func raw(_ raw: Raw) -> FakeAnswer { FakeAnswer(action: .raw(raw)) }

    /// No answer while the connection is open.
    public static let never = FakeAnswer(action: .never)

    /// RST_STREAM with this HTTP/2 error code. 7, REFUSED_STREAM, tells the client that the request was not processed, and the
    /// records count it as refused. 2 is INTERNAL_ERROR.
    public static func reset(code: Int) -> FakeAnswer { FakeAnswer(action: .reset(code: code)) }

    /// GOAWAY, then the end of the connection.
    public static func goAway(_ goAway: GoAway = GoAway()) -> FakeAnswer { FakeAnswer(action: .goAway(goAway)) }

    /// The connection ends at once, without GOAWAY.
    public static let close = FakeAnswer(action: .close)

    /// The same answer after a delay. Meanwhile the stream stays open, and other streams are answered.
    public func delayed(by delay: Duration) -> FakeAnswer {
        var answer = self
        answer.delay = delay
        return answer
    }

    /// The same answer once the gate is open. Meanwhile the stream stays open, and other streams are answered.
    public func held(until gate: FakeGate) -> FakeAnswer {
        var answer = self
        answer.gate = gate
        return answer
    }

    /// The same answer after an informational response for each of these statuses, such as 100 or 103. For answers with a status.
    public func preceded(by informational: [Int]) -> FakeAnswer {
        var answer = self
        answer.manner = manner ?? Manner()
        answer.manner?.informational = informational
        return answer
    }

    /// The same answer with trailers, which end the stream. For answers with a status.
    public func followed(byTrailers trailers: [(name: String, value: String)]) -> FakeAnswer {
        var answer = self
        answer.manner = manner ?? Manner()
        answer.manner?.trailers = trailers
        return answer
    }

    /// The same answer, cut short: the rest is never sent. For answers with a status.
    public func cut(_ cut: Cut) -> FakeAnswer {
        var answer = self
        answer.manner = manner ?? Manner()
        answer.manner?.cut = cut
        return answer
    }

    /// The same answer after a SETTINGS frame on its connection.
    public func changing(_ settings: FakeSettings) -> FakeAnswer {
        var answer = self
        answer.settings = settings
        return answer
    }

    /// How the frames of an answer differ from the usual ones.
    struct Manner: Sendable {
        var informational: [Int] = []
        var trailers: [(name: String, value: String)] = []
        var cut: Cut?
    }

    /// Where an answer is cut short, and how.
    public struct Cut: Sendable {
        public enum Way: Sendable {
            /// RST_STREAM with this HTTP/2 error code; 0 is NO_ERROR, 8 is CANCEL.
            case reset(code: Int)
            /// The connection ends without GOAWAY and without TLS's close_notify.
            case close
        }

        /// The number of body bytes that are sent; 0 for headers only. Nil for the whole answer with END_STREAM.
        public var after: Int?
        public var way: Way

        public init(after: Int? = 0, by way: Way) {
            self.after = after
            self.way = way
        }
    }

    /// An answer in every detail. Nothing is added: no `apns-id`, no `content-length`.
    public struct Raw: Sendable {
        /// How the stream ends after the body.
        public enum End: Sendable {
            case normally
            /// RST_STREAM with this error code: the answer is truncated.
            case reset(code: Int)
            /// It does not end: the answer stays incomplete.
            case never
        }

        public var status: String
        public var headers: [(name: String, value: String)]
        public var body: [UInt8]
        /// The delay between headers and body.
        public var bodyDelay: Duration
        public var end: End

        public init(
            status: String, headers: [(name: String, value: String)] = [], body: [UInt8] = [],
            bodyDelay: Duration = .zero, end: End = .normally
        ) {
            self.status = status
            self.headers = headers
            self.body = body
            self.bodyDelay = bodyDelay
            self.end = end
        }
    }
}

extension FakeAnswer {
    /// How the records count the answer on a stream.
    func outcome(on stream: Int) -> FakeOutcome {
        switch action {
        case .status(let status, let reason, _): FakeOutcome(status, reason ?? "")
        case .raw(let raw): FakeOutcome(Int(raw.status) ?? 0, "raw")
        case .never: FakeOutcome(0, "never")
        case .reset: FakeOutcome(0, "reset")
        case .goAway(let goAway): goAway.answers(stream) ? FakeOutcome(200) : FakeOutcome(0, "goAway")
        case .close: FakeOutcome(0, "close")
        }
    }

    /// Whether it tells the client that its request was not processed (RFC 9113, 6.8 and 8.7).
    func refuses(_ stream: Int) -> Bool {
        switch action {
        case .reset(let code): code == 7
        case .goAway(let goAway): !goAway.processes(stream)
        case .status, .raw, .never, .close: false
        }
    }
}
