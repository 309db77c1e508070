/// What a session reports, in the order in which it happened.
enum SessionEvent: Equatable {
    /// The server's settings: how many streams it allows at once.
    case settings(mostStreams: Int)
    /// The head of a response with a final status. The end of the response has not arrived yet.
    case head(Int32, PushResponse)
    /// A complete response.
    case answer(Int32, PushResponse)
    /// A stream has ended, with or without a response: an error code of RFC 9113, 7.
    case closed(Int32, code: UInt32)
    /// The server closes the connection, and has processed no stream above `last`.
    case goAway(last: Int32, PushGoAway)
}
