/// How many requests may be under way to one server.
///
/// Until the first valid provider token a connection of APNs allows one stream (Apple, "Establishing a token-based connection
/// to APNs"), and the client learns of it after it has begun to send: so no more than one goes to a connection that has not
/// yet answered, and those that libcurl had meant for it come back unsent.
struct Admission {
    /// With a connection that has answered: 1 or more.
    let most: Int
    private var reduced: Int?

    init(most: Int) {
        self.most = most
    }

    /// - Parameter answering: How many connections have answered already.
    func limit(answering: Int) -> Int {
        answering == 0 ? 1 : reduced ?? most
    }

    /// One came back unsent: libcurl would open another connection for it, which is not yet to have more than one.
    ///
    /// - Parameter underWay: How many are, without it.
    mutating func cameBack(underWay: Int) {
        reduced = max(1, min(underWay, reduced ?? underWay))
    }

    /// A connection has given its first answer, or has gone without one.
    mutating func connectionsChanged() {
        reduced = nil
    }
}
