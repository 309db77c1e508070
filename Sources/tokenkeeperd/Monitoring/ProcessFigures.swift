internal import FoundationEssentials
internal import Glibc

/// What the kernel says of this process, under the names that every exporter uses:
/// https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
struct ProcessFigures {
    static func add(to text: inout MetricsText, startedAt: Date) {
        text.prefix = "process_"
        defer { text.prefix = MetricsText.own }
        var usage = rusage()
        if unsafe getrusage(RUSAGE_SELF.rawValue, &usage) == 0 {
            let seconds = [usage.ru_utime, usage.ru_stime].map { Double($0.tv_sec) + Double($0.tv_usec) / 1e6 }
            text.add(
                "cpu_seconds_total", .counter, "Total user and system CPU time spent in seconds.",
                seconds.reduce(0, +))
        }
        text.add(
            "start_time_seconds", .gauge, "Start time of the process since unix epoch in seconds.",
            startedAt.timeIntervalSince1970)
        // In pages: the whole size, and what is in memory.
        let sizes = (try? String(contentsOfFile: "/proc/self/statm", encoding: .utf8))?.split(separator: " ")
            .compactMap { Double($0) }
        let page = Double(sysconf(Int32(_SC_PAGESIZE)))
        if let sizes, sizes.count > 1 {
            text.add("virtual_memory_bytes", .gauge, "Virtual memory size in bytes.", sizes[0] * page)
            text.add("resident_memory_bytes", .gauge, "Resident memory size in bytes.", sizes[1] * page)
        }
        let open = try? FileManager.default.contentsOfDirectory(atPath: "/proc/self/fd").count
        text.add("open_fds", .gauge, "Number of open file descriptors.", open.map(Double.init))
        var limit = rlimit()
        if unsafe getrlimit(__rlimit_resource_t(RLIMIT_NOFILE.rawValue), &limit) == 0 {
            text.add("max_fds", .gauge, "Maximum number of open file descriptors.", Double(limit.rlim_cur))
        }
    }
}
