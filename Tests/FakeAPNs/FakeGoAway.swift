extension FakeAnswer {
    /// How the server ends a connection.
    public struct GoAway: Sendable {
        /// The last stream that counts as processed. Streams above it are refused: they get no answer, and the records count
        /// their requests as refused, unless they were answered before.
        public enum Last: Sendable, Equatable {
            /// This request's stream, which is answered with 200.
            case thisProcessed
            /// The stream before this request's, which is refused too.
            case thisNotProcessed
            /// The highest stream that has arrived. This request is answered with 200.
            case seen
            /// This number, from 0 to 2^31-1. If it is above those that have arrived, later requests up to it are answered.
            case stream(Int)
            /// 2^31-1, which announces a graceful end. All streams are answered, this one with 200.
            case maximum
        }

        /// A GOAWAY with the last stream 2^31-1 before the real one: RFC 9113, 6.8. Requests that arrive between the two are answered.
        public enum Notice: Sendable, Equatable {
            /// Directly before it.
            case atOnce
            /// Until the client has answered a PING. Then all requests that it sent before it read the notice have arrived.
            case roundTrip
            case time(Duration)
        }

        public enum Closing: Sendable {
            /// When the streams in flight have been answered.
            case afterStreams
            /// Directly after the GOAWAY frame.
            case atOnce
            /// Never: the connection stays open and takes no more requests.
            case never
        }

        public var last: Last
        /// The HTTP/2 error code; 0 is NO_ERROR. A notice always has 0.
        public var code: Int
        /// The reason in the debug data, in Apple's form `{"reason":"…"}`. Nil for no debug data. A notice has none.
        public var reason: String?
        public var closing: Closing
        /// Nil for no notice.
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

        /// Whether the request with this answer counts as processed.
        func processes(_ stream: Int) -> Bool {
            switch last {
            case .thisProcessed, .seen, .maximum: true
            case .thisNotProcessed: false
            case .stream(let last): stream <= last
            }
        }

        /// Whether the request with this answer is answered.
        func answers(_ stream: Int) -> Bool { processes(stream) && closing != .atOnce }
    }
}
