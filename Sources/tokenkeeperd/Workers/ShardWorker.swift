internal import Logging
internal import TokenLedger
internal import TokenModel

/// Tells the other shards what concerns their devices, and asks them for nothing: `DevicePost` delivers, and each shard decides for itself.
///
/// It has one connection to its own database, and one to each shard that it has something for. A shard that is down delays only what is for it.
struct ShardWorker {
    let worker: Worker
    let map: ShardMap
    let bell: Wakeup

    func run() {
        var post = DevicePost(map, own: worker.configuration.address)
        var failing: Set<Int> = []
        var isWarned = false
        worker.run(bell: bell) { connection, _, succeeded in
            while !worker.stop.isAsked {
                worker.report.beat(worker.part, within: Worker.grace)
                let round = try post.round(on: &connection) { [report = worker.report, part = worker.part] within, _ in
                    report.beat(part, within: within)
                }
                succeeded()
                guard let round else {
                    if !isWarned {
                        isWarned = true
                        worker.logger.warning(
                            "shards.map is set, but this database is no shard: run tokenkeeperd router migrate")
                    }
                    worker.rest(bell, for: .seconds(10))
                    continue
                }
                for (shard, error) in round.failures where failing.insert(shard).inserted {
                    worker.logger.warning(
                        "a shard gets no messages about devices; they wait, and it may send to a token that another shard has superseded",
                        metadata: ["shard": "\(shard)", "error": "\(error)"])
                }
                for shard in round.recovered where failing.remove(shard) != nil {
                    worker.logger.notice(
                        "a shard gets messages about devices again", metadata: ["shard": "\(shard)"])
                }
                worker.rest(
                    bell, for: round.delivered > 0 ? worker.configuration.pollBusy : worker.configuration.pollIdle)
            }
        }
    }
}
