internal import FoundationEssentials
internal import Glibc

/// Where a daemon runs: a boot of a machine and a PID namespace. A daemon can tell at once whether another one in the same scope
/// has ended.
enum ProcessScope {
    /// - Parameters:
    ///   - environment: May hold `BOOT_ID`, which the unit sets: a service with `ProcSubset=pid` cannot read it from /proc.
    ///   - daemonID: The scope's name if the scope cannot be determined. Then no other daemon shares it.
    static func name(environment: [String: String], daemonID: String) -> String {
        let boot =
            (try? String(contentsOfFile: "/proc/sys/kernel/random/boot_id", encoding: .utf8)) ?? environment["BOOT_ID"]
        let space = try? FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/ns/pid")
        guard let boot = boot?.filter({ $0.isHexDigit }), !boot.isEmpty, let space else { return daemonID }
        return "\(boot)/\(space)"
    }

    /// Whether the process of another daemon in this scope still runs. True as well if another process now has its number.
    ///
    /// - Parameter daemonID: `host/pid/start`.
    static func isAlive(_ daemonID: String) -> Bool {
        let parts = daemonID.split(separator: "/")
        guard parts.count >= 3, let process = pid_t(parts[parts.count - 2]) else { return true }
        // This process has the number now, so the other daemon has ended.
        return process != getpid() && (kill(process, 0) == 0 || errno == EPERM)
    }
}
