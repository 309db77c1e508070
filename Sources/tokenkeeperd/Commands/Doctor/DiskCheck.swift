internal import Glibc
internal import TokenLedger

/// The disk of the database, if it is on this machine.
enum DiskCheck {
    /// Below this share of the whole, somebody should look.
    static let leastFree = 0.1

    static func finding(on connection: inout Connection) throws(DatabaseError) -> Finding {
        let needs = Finding(
            .notChecked, "disk",
            "needs pg_read_all_settings or pg_monitor, and a connection through a Unix socket on the server's machine")
        let (isLocal, mayRead) = try connection.query(
            "SELECT inet_server_addr() IS NULL, pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')"
        ).one { row throws(DatabaseError) in (try row.read(Bool.self), try row.read(Bool.self)) }
        guard isLocal, mayRead else { return needs }
        let folder = try connection.query("SELECT current_setting('data_directory')").value(String.self)
        var about = statvfs()
        guard unsafe statvfs(folder, &about) == 0, about.f_blocks > 0 else { return needs }
        return finding(
            folder, free: UInt64(about.f_bavail) * UInt64(about.f_frsize),
            of: UInt64(about.f_blocks) * UInt64(about.f_frsize))
    }

    /// - Parameters:
    ///   - free: In bytes, without what is reserved for root.
    ///   - total: In bytes.
    static func finding(_ folder: String, free: UInt64, of total: UInt64) -> Finding {
        let share = Double(free) / Double(total)
        let words = "\(Int(share * 100)) % (\(free >> 30) GiB) are free at \(folder)"
        return share < leastFree
            ? Finding(.problem, "disk", words, fixedBy: ["df -h \(ShellWord.quoted(folder))"])
            : Finding(.passed, "disk", words)
    }
}
