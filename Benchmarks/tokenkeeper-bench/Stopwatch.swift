/// Wall clock and processor time of a piece of work.
struct Stopwatch {
    private let cluster: PrivateCluster
    private let daemons: [MeasuredDaemon]
    private let server: Double
    private let daemon: Double
    private let drain: Double
    private let client: Double
    private let start: ContinuousClock.Instant

    init(_ cluster: PrivateCluster, _ daemons: [MeasuredDaemon] = []) throws {
        self.cluster = cluster
        self.daemons = daemons
        server = try ProcessorTime.seconds(of: cluster)
        daemon = daemons.reduce(0) { $0 + ProcessorTime.seconds(of: $1.pid) }
        drain = Self.seconds(ofThreads: Self.drainThreads, daemons)
        client = Self.seconds(ofThreads: Self.clientThreads, daemons)
        start = .now
    }

    private static let drainThreads: Set = ["drain", "backlog"]
    /// That of all APNs clients.
    private static let clientThreads: Set = ["apns"]

    private static func seconds(ofThreads names: Set<String>, _ daemons: [MeasuredDaemon]) -> Double {
        daemons.reduce(0) { $0 + ProcessorTime.seconds(ofThreads: names, of: $1.pid) }
    }

    /// - Parameter end: When the work ended, if not now.
    func sample(rows: Int, end: ContinuousClock.Instant = .now) throws -> Sample {
        Sample(
            rows: rows, seconds: start.duration(to: end) / .seconds(1),
            serverSeconds: try ProcessorTime.seconds(of: cluster) - server,
            daemonSeconds: daemons.reduce(0) { $0 + ProcessorTime.seconds(of: $1.pid) } - daemon,
            drainSeconds: Self.seconds(ofThreads: Self.drainThreads, daemons) - drain,
            clientSeconds: Self.seconds(ofThreads: Self.clientThreads, daemons) - client)
    }
}
