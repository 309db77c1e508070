import Foundation
import LedgerTestSupport

/// The daemon's client compared with others that send the same requests to the same server.
struct SendingMeasurement {
    let scale: Scale
    let report: Report
    /// Nil to measure only today's client.
    let before: SendingClient.EarlierBuild?

    /// Memory is flat if it grows at most by this factor after a quarter of the requests.
    private static let flat = 1.1
    private static let gone = 20_000

    func run() throws {
        report.note("load of the machine when this began (1, 5, 15 minutes)", Machine.load)
        let work = try SendingWork()
        // This makes the keys and certificates that all others use.
        try SendingServer(.validating, work).stop()
        try validating(work)
        try plain(work)
        try gone(work)
        try SendingLimits(scale: scale, report: report, before: before).run(work)
    }

    private func earlier(_ work: SendingWork) -> SendingClient? {
        before.map { SendingClient.ours(work, build: $0) }
    }

    private func validating(_ work: SendingWork) throws {
        let (ours, h2load) = (SendingClient.ours(work), SendingClient.h2load(work))
        var rivals: [(client: SendingClient, requests: Int)] = [(ours, scale.sends), (h2load, scale.sends)]
        let earlier = earlier(work)
        if let earlier { rivals.append((earlier, scale.sends)) }
        var without: String?
        do {
            let python = try AIOAPNs(work)
            report.note("version of aioapns", python.versions)
            rivals.append((python.client(work), scale.sends / 10))
        } catch {
            Progress.say("no aioapns: \(error)")
            without = "not measured: it could not be installed from PyPI"
        }
        let referee = SendingReferee()
        var growth: [Double] = []
        var memory: [Double] = []
        var connections: [Double] = []
        let contest = try Contest(
            "\(Scale.short(scale.sends)) requests, \(SendingServer.Kind.validating.rawValue)", rounds: scale.rounds,
            rivals.map { client, requests in
                Contest.Contestant(name: client.name) { round in
                    let server = try SendingServer(.validating, work)
                    let (sample, account) = try client.send(requests, to: server)
                    let counted = try server.stop()
                    referee.note(client.name, requests: requests, account, counted)
                    if client.name == ours.name, let memories = account.memory, let first = memories.first,
                        let last = memories.last
                    {
                        growth.append(Double(last) / Double(first))
                        memory.append(Double(last) / 1_000_000)
                        connections.append(Double(counted?.connections ?? 0))
                    }
                    return sample
                }
            })
        report.add(contest)
        let verdict = referee.verdict(ours.name)
        let measure = "requests a second, \(SendingServer.Kind.validating.rawValue), over"
        report.compare(
            "\(measure) h2load", contest.ratio(ours.name, over: h2load.name), atLeast: 0.6,
            verdict: verdict ?? referee.verdict(h2load.name))
        if let without {
            report.note("\(measure) aioapns", without)
        } else {
            report.compare(
                "\(measure) aioapns", contest.ratio(ours.name, over: AIOAPNs.name), atLeast: 15,
                verdict: verdict ?? referee.verdict(AIOAPNs.name))
        }
        report.compare(
            "processor time of the client a request", contest.cpu(ours.name, \.daemonSeconds), atMost: 15, digits: 1,
            unit: " µs", verdict: verdict)
        report.compare(
            "its memory (RSS) at the end, over that after a quarter", Spread(growth), atMost: Self.flat, digits: 3,
            verdict: verdict)
        report.compare("its memory (RSS) at the end", Spread(memory), digits: 1, unit: " MB")
        report.compare("its connections", Spread(connections), atMost: Double(SendingClient.connections), digits: 0)
        guard let earlier else { return }
        report.compare(
            "\(measure) \(earlier.name)", contest.ratio(ours.name, over: earlier.name),
            verdict: verdict ?? referee.verdict(earlier.name))
        report.compare(
            "processor time of \(earlier.name) a request", contest.cpu(earlier.name, \.daemonSeconds), digits: 1,
            unit: " µs")
    }

    private func plain(_ work: SendingWork) throws {
        let (ours, h2load) = (SendingClient.ours(work), SendingClient.h2load(work))
        let referee = SendingReferee()
        let earlier = earlier(work)
        var repeats: [Double] = []
        let contest = try Contest(
            "\(Scale.short(scale.sends)) requests, \(SendingServer.Kind.plain.rawValue)", rounds: scale.rounds,
            [ours, h2load, earlier].compactMap(\.self).map { client in
                Contest.Contestant(name: client.name) { _ in
                    let server = try SendingServer(.plain, work)
                    let (sample, account) = try client.send(scale.sends, to: server)
                    try server.stop()
                    referee.note(client.name, requests: scale.sends, account, nil)
                    if client.name == ours.name, let sends = account.sends {
                        repeats.append(Double(sends - scale.sends))
                    }
                    return sample
                }
            })
        report.add(contest)
        report.compare(
            "requests a second, \(SendingServer.Kind.plain.rawValue), over h2load",
            contest.ratio(ours.name, over: h2load.name),
            verdict: referee.verdict(ours.name) ?? referee.verdict(h2load.name))
        report.compare(
            "requests that the client sent a second time, of \(scale.sends), nghttpd",
            Spread(repeats), digits: 0)
        if let earlier {
            report.compare(
                "requests a second, \(SendingServer.Kind.plain.rawValue), over \(earlier.name)",
                contest.ratio(ours.name, over: earlier.name), verdict: referee.verdict(ours.name))
        }
    }

    /// 410s close no connection and repeat no request: each request arrives once, and all on one connection.
    private func gone(_ work: SendingWork) throws {
        let answer =
            #"{"rules": [{"match": {}, "answer": {"status": 410, "reason": "Unregistered", "timestamp": 1508249865488}}]}"#
        let server = try SendingServer(.validating, work, script: answer)
        let client = SendingClient.ours(work, connections: 1)
        let account = try client.send(Self.gone, to: server).account
        let counted = try server.stop()
        let (requests, connections) = (counted?.requests ?? 0, counted?.connections ?? 0)
        report.check(
            "\(Self.gone) responses of 410",
            "\(requests) requests, \(account.answers[410] ?? 0) responses, \(connections) connections",
            target: "\(Self.gone) requests, \(Self.gone) responses, 1 connection",
            isReached: requests == Self.gone && counted?.outcomes == ["410 Unregistered": Self.gone]
                && account.answers == [410: Self.gone] && connections == 1)
    }
}

/// Finds clients that sent anything else than requested, by their own account and by the server's.
private final class SendingReferee {
    private var faults: [String: String] = [:]

    func note(_ name: String, requests: Int, _ account: SendingClient.Account, _ counted: SendingServer.Report?) {
        var wrong: [String] = []
        if account.answers != [200: requests] { wrong.append("it has \(account.answers) responses") }
        if counted != nil, let sends = account.sends, sends != requests { wrong.append("it sent \(sends)") }
        if let counted, counted.outcomes != ["200": requests] || !counted.faults.isEmpty {
            wrong.append("the server saw \(counted.outcomes) and \(counted.faults.prefix(3))")
        }
        if wrong.isEmpty { return }
        faults[name] = "DISQUALIFIED: \(name): of \(requests) requests \(wrong.joined(separator: ", "))"
        Progress.say(faults[name] ?? "")
    }

    func verdict(_ name: String) -> String? { faults[name] }
}
