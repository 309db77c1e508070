import Foundation
import LedgerTestSupport

/// The machine that runs the benchmark.
struct Machine {
    let lines: [(name: String, value: String)]
    let settings: [String]

    init(_ cluster: PrivateCluster) throws {
        let processor =
            try String(contentsOfFile: "/proc/cpuinfo", encoding: .utf8).split(separator: "\n")
            .first { $0.hasPrefix("model name") }?.split(separator: ":").last.map(String.init) ?? "unknown"
        let kernel = try String(contentsOfFile: "/proc/sys/kernel/osrelease", encoding: .utf8)
        let session = try cluster.session("postgres")
        let server = try session.text("SHOW server_version") ?? ""
        let pgq = try session.text("SELECT default_version FROM pg_available_extensions WHERE name = 'pgq'") ?? "none"
        let daemon = try ProgramRun([DaemonProcess.program, "--version"]).output
        lines = [
            ("processor", processor.trimmingCharacters(in: .whitespaces)),
            ("cores", "\(ProcessInfo.processInfo.activeProcessorCount)"),
            ("memory", "\(ProcessInfo.processInfo.physicalMemory >> 30) GiB"),
            ("kernel", "Linux " + (kernel.split { $0 == "-" || $0.isWhitespace }.first ?? "")),
            ("file system", Self.fileSystem(of: cluster.cluster.folder)),
            ("PostgreSQL", server),
            ("PgQ", pgq),
            ("tokenkeeperd", daemon.trimmingCharacters(in: .whitespacesAndNewlines) + Self.commit),
        ]
        settings = cluster.settings
    }

    /// The current load averages.
    static var load: String {
        let text = (try? String(contentsOfFile: "/proc/loadavg", encoding: .utf8)) ?? ""
        return text.split(separator: " ").prefix(3).joined(separator: ", ")
    }

    /// The version and, in a checkout, the commit.
    private static var commit: String {
        guard let run = try? ProgramRun(["git", "rev-parse", "--short", "HEAD"]), run.status == 0 else { return "" }
        return ", commit " + run.output.trimmingCharacters(in: .whitespacesAndNewlines)
    }

    /// The type of the file system, and the kind of disk if known.
    private static func fileSystem(of folder: String) -> String {
        let found = try? ProgramRun(["findmnt", "-no", "FSTYPE,SOURCE", "--target", folder])
        let words = (found?.output ?? "").split(whereSeparator: \.isWhitespace).map(String.init)
        guard let type = words.first else { return "unknown" }
        let device = words.last.flatMap { $0.split(separator: "/").last } ?? ""
        // A virtual disk reports that it rotates, whatever the real disk is.
        if device.hasPrefix("vd") || device.hasPrefix("xvd") { return type + ", virtual disk" }
        let rotates = try? String(contentsOfFile: "/sys/block/\(device)/queue/rotational", encoding: .utf8)
        return type + (rotates.map { $0.hasPrefix("0") ? ", solid state" : ", rotating" } ?? "")
    }
}
