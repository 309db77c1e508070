extension FakeAnswer {
    /// How the server takes its leave.
    public struct GoAway: Sendable {
        /// Which stream is the last that counts as processed. Streams above it are refused: they get no answer, and the records count
        /// their requests as refused. A stream that has been answered already stays answered.
        public enum Last: Sendable, Equatable {
            /// The one that asked: it is answered with 200.
            case thisProcessed
            /// The one before: this stream is refused too.
            case thisNotProcessed
            /// The highest one that has arrived so far; this one is answered with 200.
            case seen
            /// This number, which may be above those that have arrived: then later requests are still answered up to it. 0 to 2^31-1.
            case stream(Int)
            /// 2^31-1, the announcement of a graceful end: all streams are answered, this one with 200.
            case maximum
        }

        /// A GOAWAY with the last stream 2^31-1 before the real one: RFC 9113, 6.8. Requests that arrive between the two are answered.
        public enum Notice: Sendable, Equatable {
            /// Right before it.
            case atOnce
            /// Until the client has answered a PING, and so has sent what it sends before it has read the notice.
            case roundTrip
            case time(Duration)
        }

        public enum Closing: Sendable {
            /// When the streams in flight have been answered.
            case afterStreams
            /// Right behind the GOAWAY frame.
            case atOnce
            /// Never: the client is left with a connection that takes no more requests.
            case never
        }

        public var last: Last
        /// The HTTP/2 error code; 0 is NO_ERROR. A notice always has 0.
        public var code: Int
        /// For the debug data, which are Apple's JSON `{"reason":"…"}`; nil: none. A notice has none.
        public var reason: String?
        public var closing: Closing
        /// Nil: no notice.
        public var notice: Notice?

        public init(
            last: Last = .thisNotProcessed, code: Int = 0, reason: String? = "Shutdown",
            closing: Closing = .afterStreams, notice: Notice? = nil
        ) {
            self.last = last
            self.code = code
            self.reason = reason
            self.closing = closing
            self.notice = notice
        }

        /// Whether the request that asked counts as processed.
        func processes(_ stream: Int) -> Bool {
            switch last {
            case .thisProcessed, .seen, .maximum: true
            case .thisNotProcessed: false
            case .stream(let last): stream <= last
            }
        }

        /// Whether the request that asked is answered.
        func answers(_ stream: Int) -> Bool { processes(stream) && closing != .atOnce }
    }
}
