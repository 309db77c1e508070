internal import TokenModel

/// This machine's clock against the server's.
public enum ClockCheck {
    /// The clocks may differ by this much, in microseconds. The ledger compares instants of the server, of senders and of APNs, and a provider token has the
    /// time of this machine.
    static let tolerated: Int64 = 2_000_000

    /// Asks the server for its time.
    public static func finding(on connection: inout Connection) throws(DatabaseError) -> Finding {
        let before = Instant.now
        let server = try connection.query("SELECT clock_timestamp()").value(Instant.self)
        return finding(server: server, before: before, after: .now)
    }

    /// - Parameters:
    ///   - before: This machine's time when the server was asked.
    ///   - after: When it had answered: the server's time lies between.
    static func finding(server: Instant, before: Instant, after: Instant) -> Finding {
        // Positive if this machine is ahead.
        let ahead = before.microseconds - server.microseconds
        let behind = server.microseconds - after.microseconds
        let off = max(ahead, behind)
        if off <= tolerated { return Finding(.passed, "clock", "this machine and the server agree") }
        return Finding(
            .problem, "clock",
            "this machine is \(off / 1_000_000) s \(ahead > 0 ? "ahead of" : "behind") the server: both need NTP",
            fixedBy: ["timedatectl set-ntp true"])
    }
}
