/// What the script has the server do with a valid request.
public struct FakeAnswer: Sendable {
    var action: Action
    var delay: Duration = .zero

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

    /// RST_STREAM with this HTTP/2 error code, e.g. 7 for REFUSED_STREAM, 2 for INTERNAL_ERROR.
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

    /// How the server takes its leave.
    public struct GoAway: Sendable {
        /// Which stream is the last that counts as processed.
        public enum Last: Sendable {
            /// The one that asked: it is answered with 200; those above are dropped without an answer.
            case thisProcessed
            /// The one before: this stream and those above are dropped; the client may repeat them elsewhere.
            case thisNotProcessed
            /// 2^31-1, the announcement of a graceful end: all streams are answered, this one with 200.
            case maximum
        }

        public enum Closing: Sendable {
            /// When the streams in flight have been answered.
            case afterStreams
            /// Right behind the GOAWAY frame.
            case atOnce
        }

        public var last: Last
        /// The HTTP/2 error code; 0 is NO_ERROR.
        public var code: Int
        /// For the debug data, which are Apple's JSON `{"reason":"…"}`; nil: none.
        public var reason: String?
        public var closing: Closing

        public init(
            last: Last = .thisNotProcessed, code: Int = 0, reason: String? = "Shutdown",
            closing: Closing = .afterStreams
        ) {
            self.last = last
            self.code = code
            self.reason = reason
            self.closing = closing
        }
    }
}

extension FakeAnswer {
    /// How it is counted.
    var outcome: FakeOutcome {
        switch action {
        case .status(let status, let reason, _): FakeOutcome(status, reason ?? "")
        case .raw(let raw): FakeOutcome(Int(raw.status) ?? 0, "raw")
        case .never: FakeOutcome(0, "never")
        case .reset: FakeOutcome(0, "reset")
        case .goAway(let goAway):
            switch (goAway.last, goAway.closing) {
            case (.thisProcessed, .afterStreams), (.maximum, .afterStreams): FakeOutcome(200)
            default: FakeOutcome(0, "goAway")
            }
        case .close: FakeOutcome(0, "close")
        }
    }
}
