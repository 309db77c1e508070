/// What the script has the server do with a valid request.
public struct FakeAnswer: Sendable {
    var action: Action
    var delay: Duration = .zero
    /// What is unusual about its frames; nil, almost always, for nothing.
    var manner: Manner?
    /// Sent before it.
    var settings: FakeSettings?

    enum Action: Sendable {
        case status(Int, reason: String?, timestamp: Int64?)
        case raw(Raw)
        case never
        case reset(code: Int)
        case goAway(GoAway)
        case close
    }

    /// 200.
    public static let accepted = FakeAnswer(action: .status(200, reason: nil, timestamp: nil))

    /// An error as Apple writes it: `{"reason":"…"}`, or `{"reason":"…","timestamp":…}`.
    ///
    /// - Parameter timestamp: Milliseconds since the Unix epoch; Apple has it with 410 only.
    public static func refused(_ status: Int, _ reason: String, timestamp: Int64? = nil) -> FakeAnswer {
        FakeAnswer(action: .status(status, reason: reason, timestamp: timestamp))
    }

    /// 410 Unregistered.
    public static func stale(at timestamp: Int64, reason: String = "Unregistered") -> FakeAnswer {
        refused(410, reason, timestamp: timestamp)
    }

    /// Whatever APNs would not say: any headers, any bytes.
    public static func raw(_ raw: Raw) -> FakeAnswer { FakeAnswer(action: .raw(raw)) }

    /// No answer, as long as the connection lives.
    public static let never = FakeAnswer(action: .never)

    /// RST_STREAM with this HTTP/2 error code. 7, REFUSED_STREAM, tells the client that the request was not processed, and the
    /// records count it as refused. 2 is INTERNAL_ERROR.
    public static func reset(code: Int) -> FakeAnswer { FakeAnswer(action: .reset(code: code)) }

    /// GOAWAY, and the end of the connection.
    public static func goAway(_ goAway: GoAway = GoAway()) -> FakeAnswer { FakeAnswer(action: .goAway(goAway)) }

    /// The connection ends at once, without a word of HTTP/2.
    public static let close = FakeAnswer(action: .close)

    /// The same, so much later. The stream is open meanwhile; other streams go on.
    public func delayed(by delay: Duration) -> FakeAnswer {
        var answer = self
        answer.delay = delay
        return answer
    }

    /// The same, after an answer of headers only for each of these statuses, e.g. 100 or 103. For answers with a status.
    public func preceded(by informational: [Int]) -> FakeAnswer {
        var answer = self
        answer.manner = manner ?? Manner()
        answer.manner?.informational = informational
        return answer
    }

    /// The same, with headers behind the body, which end the stream. For answers with a status.
    public func followed(byTrailers trailers: [(name: String, value: String)]) -> FakeAnswer {
        var answer = self
        answer.manner = manner ?? Manner()
        answer.manner?.trailers = trailers
        return answer
    }

    /// The same, cut short: what follows is never sent. For answers with a status.
    public func cut(_ cut: Cut) -> FakeAnswer {
        var answer = self
        answer.manner = manner ?? Manner()
        answer.manner?.cut = cut
        return answer
    }

    /// The same, after a SETTINGS frame on its connection.
    public func changing(_ settings: FakeSettings) -> FakeAnswer {
        var answer = self
        answer.settings = settings
        return answer
    }

    /// How the frames of an answer differ from those of an ordinary one.
    struct Manner: Sendable {
        var informational: [Int] = []
        var trailers: [(name: String, value: String)] = []
        var cut: Cut?
    }

    /// Where an answer breaks off, and how.
    public struct Cut: Sendable {
        public enum Way: Sendable {
            /// RST_STREAM with this HTTP/2 error code; 0 is NO_ERROR, 8 is CANCEL.
            case reset(code: Int)
            /// The connection ends without GOAWAY and without TLS's own farewell.
            case close
        }

        /// Bytes of the body that are still sent; 0: the headers only. Nil: the whole answer, END_STREAM included.
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
            /// Never: the answer stays incomplete.
            case never
        }

        public var status: String
        public var headers: [(name: String, value: String)]
        public var body: [UInt8]
        /// Between headers and body.
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
    /// How it is counted on a stream.
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
