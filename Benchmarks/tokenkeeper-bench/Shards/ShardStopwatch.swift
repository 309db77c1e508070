/// Wall clock and processor time of work on shards: of the cluster of the routers, of those of the shards, and of their daemons.
struct ShardStopwatch {
    private let fleet: ShardFleet
    private let set: ShardSet
    private let daemons: [MeasuredDaemon]
    private let router: Double
    private let shards: Double
    private let daemon: Double
    private let start: ContinuousClock.Instant

    init(_ fleet: ShardFleet, _ set: ShardSet, _ daemons: [MeasuredDaemon] = []) throws {
        self.fleet = fleet
        self.set = set
        self.daemons = daemons
        router = try ProcessorTime.seconds(of: fleet.router)
        shards = try Self.seconds(of: set)
        daemon = Self.seconds(of: daemons)
        start = .now
    }

    private static func seconds(of set: ShardSet) throws -> Double {
        try set.shards.reduce(0) { $0 + (try ProcessorTime.seconds(of: $1.cluster)) }
    }

    private static func seconds(of daemons: [MeasuredDaemon]) -> Double {
        daemons.reduce(0) { $0 + ProcessorTime.seconds(of: $1.pid) }
    }

    func sample(rows: Int) throws -> Sample {
        let seconds = start.duration(to: .now) / .seconds(1)
        return Sample(
            rows: rows, seconds: seconds, serverSeconds: try Self.seconds(of: set) - shards,
            routerSeconds: try ProcessorTime.seconds(of: fleet.router) - router,
            daemonSeconds: Self.seconds(of: daemons) - daemon)
    }
}
