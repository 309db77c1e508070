import Foundation
import LedgerTestSupport

/// What a slow link allows, and a server with a single stream, and how much of it the client uses.
struct SendingLimits {
    let scale: Scale
    let report: Report
    let before: SendingClient.EarlierBuild?

    static let payload = 3800
    /// Bytes per second in each direction, and how many requests go through in about eight seconds.
    static let links = [(rate: 50_000, requests: 100), (rate: 500_000, requests: 1000)]
    /// How long the server with one stream takes for a response, and how many requests it gets.
    static let delay = 0.02
    static let requests = 250

    func run(_ work: SendingWork) throws {
        for (rate, requests) in Self.links { try slowly(rate, requests / divisor, work) }
        try oneByOne(work)
    }

    /// QUICK=1 takes fewer requests.
    private var divisor: Int { scale.sends < Scale.full.sends ? 4 : 1 }

    private func slowly(_ rate: Int, _ requests: Int, _ work: SendingWork) throws {
        let name = "through a link of \(rate / 1000) kB/s"
        var (shares, cores): ([Double], [Double]) = ([], [])
        var sends = 0
        for round in 1...scale.rounds {
            let server = try SendingServer(.validating, work)
            let link = try SlowLink(to: server.port, rate: rate)
            defer { link.close() }
            let client = SendingClient.ours(work, port: link.port, more: ["--payload-bytes", "\(Self.payload)"])
            let (sample, account) = try client.send(requests, to: server)
            let counted = try server.stop()
            guard counted?.outcomes == ["200": requests], account.answers == [200: requests] else {
                throw TestFailure("\(name): the fake saw \(counted?.outcomes ?? [:]), expected \(requests) of 200")
            }
            sends += account.sends ?? 0
            shares.append(Double(requests * Self.payload) / account.seconds / Double(rate))
            cores.append(sample.daemonSeconds / account.seconds)
            Progress.say("\(name), round \(round) of \(scale.rounds): \(Int(sample.rate)) requests a second")
        }
        report.compare("payload bytes a second \(name), over the link's rate", Spread(shares), atLeast: 0.9)
        report.compare("share of a core that the client uses \(name)", Spread(cores), atMost: 0.05, digits: 3)
        report.check(
            "requests sent a second time \(name)", "\(sends - requests * scale.rounds)", target: "0",
            isReached: sends == requests * scale.rounds)
    }

    private func oneByOne(_ work: SendingWork) throws {
        let name = "one stream and a response after \(Int(Self.delay * 1000)) ms"
        let requests = Self.requests / divisor
        let shares = try (1...scale.rounds).map { round in
            let share = try share(of: .ours(work, connections: 1), requests, work)
            Progress.say("\(name), round \(round) of \(scale.rounds): \(share) of the rate")
            return share
        }
        report.compare("\(name): requests a second over what the delay allows", Spread(shares), atLeast: 0.8)
        guard let before else { return }
        let earlier = SendingClient.ours(work, build: before, connections: 1)
        report.compare(
            "\(name): the same of \(earlier.name)", Spread([try share(of: earlier, requests / 10, work)]))
    }

    private func share(of client: SendingClient, _ requests: Int, _ work: SendingWork) throws -> Double {
        let late = #"{"rules": [{"match": {}, "answer": {"status": 200, "delay": \#(Self.delay)}}]}"#
        let server = try SendingServer(.validating, work, script: late, more: ["--maximum-streams", "1"])
        let (sample, account) = try client.send(requests, to: server)
        let counted = try server.stop()
        guard counted?.outcomes == ["200": requests], account.answers == [200: requests] else {
            throw TestFailure("\(client.name): the fake saw \(counted?.outcomes ?? [:]), expected \(requests) of 200")
        }
        return sample.rate * Self.delay
    }
}
