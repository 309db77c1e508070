/// How many requests may be in flight to one server.
///
/// Until the first valid provider token, a connection to APNs allows one stream (Apple, "Establishing a token-based connection
/// to APNs"), and the client learns this only after it has begun to send. So a connection that has not yet responded gets one
/// request, and any others that libcurl assigns to it come back unsent.
struct Admission {
    /// The limit with a connection that has responded: 1 or more.
    let most: Int
    private var reduced: Int?

    init(most: Int) {
        self.most = most
    }

    /// - Parameter answering: How many connections have responded.
    func limit(answering: Int) -> Int {
        answering == 0 ? 1 : reduced ?? most
    }

    /// A request came back unsent: libcurl would open another connection for it, which may not have more than one yet.
    ///
    /// - Parameter underWay: How many requests are in flight without it.
    mutating func cameBack(underWay: Int) {
        reduced = max(1, min(underWay, reduced ?? underWay))
    }

    /// A connection has responded for the first time, or has closed without a response.
    mutating func connectionsChanged() {
        reduced = nil
    }
}
