internal import FoundationEssentials
internal import Glibc

/// Where a daemon runs: within the same boot of a machine and the same space of process numbers, it can be told at once whether
/// another one has ended.
enum ProcessScope {
    /// - Parameters:
    ///   - environment: `BOOT_ID`, from the unit: what is asked of /proc is not there for a service that may see processes only.
    ///   - daemonID: What stands for a place that cannot be known: then nobody else is at it.
    static func name(environment: [String: String], daemonID: String) -> String {
        let boot =
            (try? String(contentsOfFile: "/proc/sys/kernel/random/boot_id", encoding: .utf8)) ?? environment["BOOT_ID"]
        let space = try? FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/ns/pid")
        guard let boot = boot?.filter({ $0.isHexDigit }), !boot.isEmpty, let space else { return daemonID }
        return "\(boot)/\(space)"
    }

    /// Whether the process of another daemon of this place still runs, or another process has its number.
    ///
    /// - Parameter daemonID: `host/pid/start`.
    static func isAlive(_ daemonID: String) -> Bool {
        let parts = daemonID.split(separator: "/")
        guard parts.count >= 3, let process = pid_t(parts[parts.count - 2]) else { return true }
        // Our own number: that one was here before us.
        return process != getpid() && (kill(process, 0) == 0 || errno == EPERM)
    }
}
