import Foundation
import LedgerTestSupport

/// Processor time and memory, from /proc.
enum ProcessorTime {
    private static let ticksPerSecond = Double(sysconf(Int32(_SC_CLK_TCK)))

    /// Seconds of a process, including its ended children.
    private static func seconds(of process: Int32, withChildren: Bool) -> Double {
        guard let line = try? String(contentsOfFile: "/proc/\(process)/stat", encoding: .utf8),
            let end = line.lastIndex(of: ")")
        else { return 0 }
        // After the name: state is field 3; utime, stime, cutime, cstime are 14 to 17.
        let fields = line[end...].split(separator: " ").dropFirst()
        let ticks = fields.dropFirst(11).prefix(withChildren ? 4 : 2).compactMap { Double($0) }
        return ticks.reduce(0, +) / ticksPerSecond
    }

    /// The time of one process.
    static func seconds(of process: Int32) -> Double { seconds(of: process, withChildren: false) }

    /// The time of a process's threads with one of these names, in seconds, to the nanosecond.
    static func seconds(ofThreads names: Set<String>, of process: Int32) -> Double {
        let folder = "/proc/\(process)/task"
        let threads = (try? FileManager.default.contentsOfDirectory(atPath: folder)) ?? []
        return threads.reduce(0) { sum, thread in
            guard let name = try? String(contentsOfFile: "\(folder)/\(thread)/comm", encoding: .utf8),
                names.contains(name.trimmingCharacters(in: .newlines)),
                let times = try? String(contentsOfFile: "\(folder)/\(thread)/schedstat", encoding: .utf8),
                let nanoseconds = times.split(separator: " ").first.flatMap({ Double($0) })
            else { return sum }
            return sum + nanoseconds / 1e9
        }
    }

    /// The time of a process with one thread, in seconds, to the nanosecond.
    private static func precise(of process: Int32) -> Double {
        let times = (try? String(contentsOfFile: "/proc/\(process)/schedstat", encoding: .utf8)) ?? ""
        return times.split(separator: " ").first.flatMap { Double($0) }.map { $0 / 1e9 } ?? 0
    }

    /// The time of the whole server: the postmaster and its children, including ended ones.
    static func seconds(of cluster: PrivateCluster) throws -> Double {
        let main = try postmaster(of: cluster)
        let children = try String(contentsOfFile: "/proc/\(main)/task/\(main)/children", encoding: .utf8)
            .split(separator: " ").compactMap { Int32($0) }
        return children.reduce(seconds(of: main, withChildren: true)) { $0 + precise(of: $1) }
    }

    private static func postmaster(of cluster: PrivateCluster) throws -> Int32 {
        // Readable only for root and the user that the server runs as: we are one of the two.
        let text = try String(contentsOfFile: "\(cluster.cluster.folder)/data/postmaster.pid", encoding: .utf8)
        guard let process = text.split(separator: "\n").first.flatMap({ Int32($0) }) else {
            throw TestFailure("no server")
        }
        return process
    }

    /// A line of /proc/…/status in kB, such as `VmHWM`.
    static func kilobytes(_ name: String, of process: Int32) -> Int {
        let text = (try? String(contentsOfFile: "/proc/\(process)/status", encoding: .utf8)) ?? ""
        let line = text.split(separator: "\n").first { $0.hasPrefix(name + ":") } ?? ""
        return line.split(whereSeparator: \.isWhitespace).dropFirst().first.flatMap { Int($0) } ?? 0
    }
}
