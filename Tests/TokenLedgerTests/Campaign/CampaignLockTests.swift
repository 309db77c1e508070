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

    @Test func `the campaign of another login can neither be changed nor locked`() throws {
        let stage = try CampaignStage(tokens: 1)
        let campaign = try stage.enqueue()
        let stranger = "login_\(UInt32.random(in: 0...UInt32.max))"
        try stage.database.psql("CREATE ROLE \(stranger) LOGIN IN ROLE tokenkeeper_sender", user: "postgres")
        defer { _ = try? stage.database.psql("DROP ROLE \(stranger)", user: "postgres") }
        // Whoever waits for the lock of this transaction fails by its own limit.
        var owner = try stage.database.connect(user: "a_sender")
        try owner.execute("BEGIN; SELECT tokenkeeper.pause_campaign(\(campaign))")
        for call in ["pause_campaign(\(campaign))", "cancel_campaign(\(campaign))"] {
            let error = #expect(throws: (any Error).self) {
                try stage.database.psql("SET lock_timeout = '5s'; SELECT tokenkeeper.\(call)", user: stranger)
            }
            #expect("\(String(describing: error))".contains("campaign \(campaign) belongs to a_sender"), "\(call)")
        }
        try owner.execute("COMMIT")
        #expect(throws: (any Error).self) {
            try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(campaign))", user: stranger)
        }
        #expect(try stage.database.psql("SELECT state FROM tokenkeeper.campaign") == "paused")
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

    @Test func `a lock on a single request keeps no campaign's request from ending`() throws {
        let stage = try CampaignStage(tokens: 1)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let held = try stage.claim(campaign).keys.sorted()
        try stage.database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(CampaignStage.topic)', 'aa', '\(CampaignStage.alert)')",
            user: "a_sender")
        let single = try #require(stage.claimSingle().keys.first)
        var other = try stage.database.connect(user: "postgres")
        try other.execute("BEGIN; SELECT FROM tokenkeeper.send_request FOR UPDATE")
        var daemon = try stage.database.connect(user: "a_daemon")
        var outbox = outbox
        outbox.lockTimeout = .milliseconds(50)
        let endings = [held[0], single].map {
            RequestEnding(number: Int64($0), fate: .answered, answer: .init(status: 200), sentAt: .now)
        }
        let error = #expect(throws: DatabaseError.self) { try outbox.finish(endings, on: &daemon) }
        #expect(error?.remedy == .retry)
        #expect(try stage.progress(campaign) == "1|0|1|0|0|0|0|0|0")
        try other.execute("COMMIT")
        #expect(try outbox.finish(endings, on: &daemon).requests == 1, "that of the campaign has ended")
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
                [.init(number: single, fate: "later", status: 503, pause: 0)], by: "a"))
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

    /// Requests of both kinds that did not reach their devices, and no longer count in the share of this hour.
    @Test(arguments: ["a batch and a single request", "single requests, one of them of a campaign"])
    func `endings lock the devices of background pushes in the order in which a claim does`(what: String) throws {
        let stage = try CampaignStage(tokens: 2)
        try stage.database.psql(
            "ALTER DATABASE \(stage.database.name) SET deadlock_timeout = '1ms'", user: "postgres")
        let (ofBatch, ofSingle) = what.hasPrefix("a batch") ? (2, 1) : (1, 2)
        let silent = #"{"aps":{"content-available":1}}"#
        let campaign = try stage.enqueue("tokens => '{\(CampaignStage.token(ofBatch))}'", payload: silent)
        try stage.addressAll(campaign)
        try stage.database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(CampaignStage.topic)', '\(CampaignStage.token(ofSingle))', '\(silent)')",
            user: "a_sender")
        var numbers = Array(try stage.claim(campaign, backgroundPerHour: 3).keys)
        if ofBatch == 1 {
            try stage.finish([.init(number: numbers[0], fate: "interrupted", pause: 0)])
            numbers = []
        }
        numbers += try stage.claimSingle(backgroundPerHour: 3).keys
        #expect(numbers.count == 2)

        // The claim of another daemon has counted a push to the first device, and goes on to the second.
        var claim = try stage.database.connect(user: "a_daemon")
        let pid = try claim.query("SELECT pg_backend_pid()").value(Int.self)
        func counting(_ token: Int) -> String {
            "SELECT room FROM tokenkeeper.note_background('production', '\(CampaignStage.topic)', ARRAY['\\x\(CampaignStage.token(token))'::bytea], ARRAY[1], 3)"
        }
        try claim.execute("BEGIN; \(counting(1))")
        let failures = Failures()
        let done = DispatchSemaphore(value: 0)
        let fates = Dictionary(uniqueKeysWithValues: numbers.map { ($0, RequestFate.later(.seconds(60), "503")) })
        Thread.detachNewThread {
            do {
                if try !self.finish(fates, stage).isEmpty { failures.add("something is locked") }
            } catch {
                failures.add("\(error)")
            }
            done.signal()
        }
        try eventually("the endings wait") {
            try failures.all != []
                || stage.database.psql(
                    "SELECT count(*) FROM pg_locks AS l WHERE NOT l.granted AND \(pid) = ANY (pg_blocking_pids(l.pid))")
                    == "1"
        }
        try claim.execute(counting(2))
        try claim.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
        // An interrupted push may have reached its device, and counts.
        let sent = try stage.database.psql(
            "SELECT string_agg(cardinality(sent_at)::text, ' ' ORDER BY token_key) FROM tokenkeeper.background_send")
        #expect(sent == (ofBatch == 1 ? "2 1" : "1 1"))
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

    @Test(arguments: ["COMMIT", "ROLLBACK"])
    func `a cancellation does not wait for a claim, and ends what it had`(end: String) throws {
        let stage = try CampaignStage(tokens: 3)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        var daemon = try stage.database.connect(user: "a_daemon")
        try daemon.execute("BEGIN")
        let numbers = try daemon.query(
            "SELECT c.number FROM tokenkeeper.claim_campaign($1, 'a', 100, 0) AS c", [.int8(Int64(campaign))]
        ).decode { row throws(DatabaseError) in try row.read(Int64.self) }
        #expect(numbers.count == 3)
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(campaign))", user: "a_sender")
        try daemon.execute(end)
        if end == "COMMIT" {
            let recalled = try stage.database.psql(
                "SELECT count(*) FROM tokenkeeper.recalled_requests('a', ARRAY[\(numbers.map(String.init).joined(separator: ","))]::bigint[]) WHERE NOT is_gone",
                user: "a_daemon")
            #expect(recalled == "3")
            try stage.finish(numbers.map { .returned(Int($0)) })
        }
        #expect(try stage.state(campaign) == "cancelled")
        #expect(try stage.progress(campaign) == "3|0|0|0|0|0|0|3|0")
        #expect(try stage.count("campaign", "ended_at IS NULL") == 0)
    }
}
