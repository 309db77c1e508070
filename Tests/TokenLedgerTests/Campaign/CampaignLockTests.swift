import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// People and daemons change a campaign at the same time.
@Suite(.ownThread) struct `Locks of a campaign` {
    private let outbox = Outbox(daemonID: "a", processScope: "", lockTimeout: .seconds(5))

    private func finish(_ fates: [Int: RequestFate], _ stage: CampaignStage) throws -> Set<Int64> {
        var daemon = try stage.database.connect(user: "a_daemon")
        let endings = fates.sorted { $0.key < $1.key }.map { number, fate -> RequestEnding in
            let answer: RequestEnding.Answer? = fate == .answered ? .init(status: 200) : nil
            return RequestEnding(number: Int64(number), fate: fate, answer: answer, sentAt: .now)
        }
        return try outbox.finish(endings, on: &daemon).locked
    }

    @Test(arguments: ["pause_campaign", "resume_campaign", "cancel_campaign"])
    func `an open transaction of an operator delays the endings of its campaign, and of nothing else`(change: String)
        throws
    {
        let stage = try CampaignStage(tokens: 6)
        let (first, second) = (try stage.enqueue(), try stage.enqueue())
        for campaign in [first, second] { try stage.addressAll(campaign) }
        let (held, others) = (try stage.claim(first).keys.sorted(), try stage.claim(second).keys.sorted())
        for numbers in [held, others] {
            try stage.finish([.init(number: numbers[0], fate: "interrupted")])
        }
        let singles = try stage.database.psql("SELECT request_id FROM tokenkeeper.send_request ORDER BY campaign_id")
            .split(separator: "\n").compactMap { Int($0) }
        #expect(try stage.claimSingle().count == 2)
        if change == "resume_campaign" {
            try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(first))", user: "a_sender")
        }
        let fates: [RequestFate] = [
            .answered, .later(.zero, "503"), .failed("x"), .interrupted(.zero, "lost"), .returned(nil),
        ]
        let ofFirst = Dictionary(uniqueKeysWithValues: zip(held[1...], fates))
        let ofSecond = Dictionary(uniqueKeysWithValues: zip(others[1...], fates))

        var sender = try stage.database.connect(user: "a_sender")
        try sender.execute("BEGIN; SELECT tokenkeeper.\(change)(\(first))")
        let all = ofFirst.merging(ofSecond) { $1 }.merging([singles[0]: .later(.zero, "503"), singles[1]: .answered]) {
            $1
        }
        let locked = try finish(all, stage)
        #expect(locked == Set((ofFirst.keys + [singles[0]]).map(Int64.init)))
        #expect(try stage.progress(second) == "6|3|2|0|0|0|1|0|0")
        #expect(try stage.progress(first) == "6|6|0|0|0|0|0|0|0")
        #expect(try finish(all, stage) == locked, "nothing is written, and nothing is lost")
        try sender.execute("COMMIT")

        let rest = all.filter { locked.contains(Int64($0.key)) }
        #expect(try finish(rest, stage) == [])
        #expect(try finish(rest, stage) == [], "nothing ends twice")
        let (waiting, failed, cancelled) = change == "cancel_campaign" ? (0, 2, 3) : (4, 1, 0)
        #expect(try stage.progress(first) == "6|\(waiting)|1|0|0|0|\(failed)|\(cancelled)|0")
        let atRest = try stage.count("send_request", "campaign_id = \(first) AND scheduled_at = 'infinity'")
        #expect(atRest == (change == "pause_campaign" ? 3 : 0))
    }

    /// The finishing transaction is first, but commits while the other one waits for it.
    @Test(arguments: ["pause_campaign", "resume_campaign", "cancel_campaign"])
    func `a change also applies to what is given back or moved at the same moment`(change: String) throws {
        let stage = try CampaignStage(tokens: 4)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let claimed = try stage.claim(campaign).keys.sorted()
        try stage.finish([.init(number: claimed[0], fate: "later", status: 503, pause: 0)])
        let single = try #require(try stage.claimSingle().keys.first)
        if change == "resume_campaign" {
            try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(campaign))", user: "a_sender")
        }
        var daemon = try stage.database.connect(user: "a_daemon")
        let pid = try daemon.query("SELECT pg_backend_pid()").value(Int.self)
        try daemon.execute("BEGIN")
        try daemon.execute(
            CampaignStage.finishing(
                [.init(number: claimed[1], fate: "later", status: 503, pause: 0), .returned(claimed[2])], by: "a"))
        try daemon.execute(
            CampaignStage.finishing(
                [.init(number: single, fate: "later", status: 503, pause: 0)], by: "a", function: "finish_requests"))
        let failures = Failures()
        let done = DispatchSemaphore(value: 0)
        Thread.detachNewThread {
            do { try stage.database.psql("SELECT tokenkeeper.\(change)(\(campaign))", user: "a_sender") } catch {
                failures.add("\(error)")
            }
            done.signal()
        }
        try eventually("the other waits") {
            try stage.database.psql(
                "SELECT count(*) FROM pg_locks AS l WHERE NOT l.granted AND \(pid) = ANY (pg_blocking_pids(l.pid))")
                != "0"
        }
        try daemon.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
        let atRest = try stage.count("send_request", "scheduled_at = 'infinity'")
        switch change {
        case "pause_campaign": #expect(atRest == 2)
        case "resume_campaign": #expect(try atRest == 0 && stage.claimSingle().count == 2)
        default: #expect(try stage.progress(campaign) == "4|1|0|0|0|0|0|3|0")
        }
    }

    private final class Daemon {
        var session: Connection

        init(_ session: consuming Connection) { self.session = session }
    }

    /// Some finishing transaction is open at every moment.
    @Test func `a pause does not wait for ever behind daemons that finish all the time`() throws {
        let stage = try CampaignStage(tokens: 900)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        var numbers: [[Int]] = []
        var daemons: [Daemon] = []
        for daemon in ["a", "b"] {
            numbers.append(try stage.claim(campaign, by: daemon, most: 500).keys.sorted())
            daemons.append(Daemon(try stage.database.connect(user: "a_daemon")))
        }
        func begin(_ daemon: Int) throws {
            try daemons[daemon].session.execute("BEGIN")
            let number = numbers[daemon].popLast()!
            try daemons[daemon].session.execute(
                CampaignStage.finishing(
                    [.init(number: number, fate: "later", status: 503, pause: 0)], by: ["a", "b"][daemon]))
        }
        try begin(0)
        let failures = Failures()
        let isPaused = Failures()
        Thread.detachNewThread {
            do { try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(campaign))", user: "a_sender") } catch {
                failures.add("\(error)")
            }
            isPaused.add("paused")
        }
        var round = 0
        while isPaused.all.isEmpty, numbers.allSatisfy({ !$0.isEmpty }) {
            round += 1
            try begin(round % 2)
            try daemons[1 - round % 2].session.execute("COMMIT")
        }
        #expect(isPaused.all == ["paused"] && failures.all == [])
        try daemons[round % 2].session.execute("COMMIT")
        try eventually("it returns") { !isPaused.all.isEmpty }
        #expect(try stage.state(campaign) == "paused")
        #expect(try stage.count("send_request", "scheduled_at <> 'infinity'") == 0)
    }

    @Test func `a claim that began before a pause gets nothing after it`() throws {
        let stage = try CampaignStage(tokens: 3)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        // When the claim has read the campaign's state, it waits for the first row of the topic's rate.
        try stage.database.psql("UPDATE tokenkeeper.topic SET max_per_second = 1000")
        var holder = try stage.database.connect()
        let pid = try holder.query("SELECT pg_backend_pid()").value(Int.self)
        try holder.execute(
            "BEGIN; INSERT INTO tokenkeeper.topic_rate SELECT topic_id, '-infinity' FROM tokenkeeper.topic")
        let claimed = Failures()
        let done = DispatchSemaphore(value: 0)
        Thread.detachNewThread {
            do { claimed.add("\(try stage.claim(campaign).count)") } catch { claimed.add("\(error)") }
            done.signal()
        }
        try eventually("the claim waits") {
            try stage.database.psql(
                "SELECT count(*) FROM pg_locks AS l WHERE NOT l.granted AND \(pid) = ANY (pg_blocking_pids(l.pid))")
                != "0"
        }
        try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(campaign))", user: "a_sender")
        try holder.execute("COMMIT")
        done.wait()
        #expect(claimed.all == ["0"])
        #expect(try stage.count("campaign_batch", "claimed_by IS NOT NULL") == 0)
    }
}
