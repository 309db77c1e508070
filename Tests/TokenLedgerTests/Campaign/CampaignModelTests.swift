import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

/// A random history of everything that happens to campaigns. After each step, each request is where a small model says, and
/// `campaign_progress` is exact.
@Suite(.ownThread) struct `Any history of campaigns` {
    /// What the model knows about a request.
    struct Known {
        var token: Int
        /// Who may be sending it.
        var holder: String?
        var final: String?
        /// It has moved to `send_request`.
        var moved = false
    }

    @Test(arguments: 0..<3) func `addresses each token once, and ends each request once`(round: Int) throws {
        let seed = Seed.next("\(round)")
        var chance = SeededChance(seed: seed)
        let tokens = 700
        let stage = try CampaignStage(tokens: tokens)
        var suppressed = Set<Int>()
        var forgotten = Set<Int>()
        var campaigns: [Int] = []
        var known: [Int: [Int: Known]] = [:]
        var state: [Int: String] = [:]
        /// request_id of single requests in a hand: the campaign and the number.
        var singles: [Int: (campaign: Int, number: Int, holder: String)] = [:]
        var seen = 0

        /// The endings since the last call.
        func endings() throws -> [(campaign: Int, number: Int, outcome: String)] {
            let rows = try stage.database.psql(
                """
                SELECT e.campaign_id, e.batch << 9 | o, e.outcome, e.ending_id FROM tokenkeeper.campaign_ending AS e, unnest(e.ordinals) AS o
                WHERE e.ending_id > \(seen) ORDER BY e.ending_id
                """)
            return rows.split(separator: "\n").map {
                let parts = $0.split(separator: "|")
                seen = max(seen, Int(parts[3])!)
                return (Int(parts[0])!, Int(parts[1])!, String(parts[2]))
            }
        }

        /// Takes the new endings into the model. Each must be one that this step may have caused.
        func note(_ step: String, _ allows: (_ known: Known, _ campaign: Int, _ number: Int, _ outcome: String) -> Bool)
            throws
        {
            for ending in try endings() {
                guard var request = known[ending.campaign]?[ending.number] else {
                    Issue.record("\(step): \(ending) was never addressed")
                    continue
                }
                #expect(request.final == nil, "\(step): \(ending) after \(request)")
                #expect(
                    allows(request, ending.campaign, ending.number, ending.outcome), "\(step): \(ending) of \(request)")
                if ending.outcome == "requeued" {
                    #expect(!request.moved, "\(step): \(ending)")
                    request.moved = true
                } else {
                    request.final = ending.outcome
                }
                request.holder = nil
                known[ending.campaign]![ending.number] = request
            }
        }

        /// Compares everything that the database shows with the model.
        func check(_ step: String) throws {
            for campaign in campaigns {
                let requests = known[campaign]!.values
                let counts = ["accepted", "stale", "suspect", "suppressed", "failed", "cancelled", "forgotten"].map {
                    outcome in
                    requests.count { $0.final == outcome }
                }
                let waiting = requests.count { $0.final == nil }
                let expected = ([requests.count, waiting] + counts).map(String.init).joined(separator: "|")
                #expect(try stage.progress(campaign) == expected, "\(step), seed \(seed)")
                let there = try stage.database.psql(
                    """
                    SELECT coalesce((SELECT sum(b.requests - bit_count(b.ended)) FROM tokenkeeper.campaign_batch AS b WHERE b.campaign_id = \(campaign)), 0)
                           + (SELECT count(*) FROM tokenkeeper.send_request AS r WHERE r.campaign_id = \(campaign))
                    """)
                #expect(there == "\(waiting)", "\(step), seed \(seed): where the waiting ones are")
            }
        }

        func held(by daemon: String) -> [(campaign: Int, number: Int)] {
            known.sorted { $0.key < $1.key }.flatMap { campaign, requests in
                requests.sorted { $0.key < $1.key }.filter {
                    $0.value.holder == daemon && !$0.value.moved && $0.value.final == nil
                }
                .map { (campaign, $0.key) }
            }
        }

        for step in 0..<Soak.size(100, whole: 500) {
            let daemon = ["a", "b", "c"][chance.dice(3)]
            var what = ""
            switch chance.dice(16) {
            case 0 where campaigns.count < 4:
                let audience = ["everyone => true", "tags => '!n:5'", "everyone => true, max_per_second => 1000000"][
                    chance.dice(3)]
                let campaign = try stage.enqueue(audience)
                what = "enqueue \(campaign)"
                campaigns.append(campaign)
                known[campaign] = [:]
                state[campaign] = "running"
            case 1, 2:
                guard let campaign = campaigns.randomElement(using: &chance) else { continue }
                what = "address \(campaign)"
                let undone = chance.dice(4) == 0
                if undone {
                    try stage.database.psql(
                        "BEGIN; SELECT tokenkeeper.address_campaign(\(campaign), 10000); ROLLBACK",
                        user: "a_daemon")
                } else {
                    let added = try stage.address(campaign) ?? 0
                    let rows = try stage.database.psql(
                        """
                        SELECT b.batch << 9 | k.n, encode(k.key, 'hex') FROM tokenkeeper.campaign_batch AS b, unnest(b.token_keys) WITH ORDINALITY AS k (key, n)
                        WHERE b.campaign_id = \(campaign) AND k.key IS NOT NULL
                        """)
                    var new = 0
                    for (number, token) in CampaignStage.requests(rows) where known[campaign]![number] == nil {
                        #expect(!known[campaign]!.values.contains { $0.token == token }, "\(what): \(token) twice")
                        #expect(
                            !suppressed.contains(token) && !forgotten.contains(token) && state[campaign] == "running",
                            "\(what)")
                        known[campaign]![number] = Known(token: token)
                        new += 1
                    }
                    #expect(new == added, "\(what)")
                }
            case 3, 4, 5:
                guard let campaign = campaigns.randomElement(using: &chance) else { continue }
                what = "claim \(campaign) by \(daemon)"
                if chance.dice(5) == 0 {
                    try stage.database.psql(
                        "BEGIN; SELECT tokenkeeper.claim_campaign(\(campaign), '\(daemon)', 500, 0); ROLLBACK",
                        user: "a_daemon")
                    break
                }
                for (negative, token) in try stage.claim(campaign, by: daemon, most: 100 + chance.dice(900)) {
                    let number = -negative & 0xffff_ffff
                    let request = known[campaign]![number]
                    #expect(
                        request?.token == token && request?.holder == nil && request?.final == nil
                            && request?.moved == false, "\(what)")
                    #expect(
                        !suppressed.contains(token) && !forgotten.contains(token) && state[campaign] == "running",
                        "\(what)")
                    known[campaign]![number]!.holder = daemon
                }
                try note(what) { request, of, _, outcome in
                    of == campaign && outcome == "suppressed" && suppressed.contains(request.token)
                        && request.holder == nil && !request.moved
                }
            case 6, 7, 8, 9:
                what = "finish by \(daemon)"
                var words: [CampaignStage.Word] = []
                var expected: [Int: String?] = [:]
                // Some of its own, and some that are nobody's or another's.
                for (campaign, number) in held(by: daemon).shuffled(using: &chance).prefix(chance.dice(400)) {
                    let negative = -(campaign << 32 | number)
                    let cancelled = state[campaign] == "cancelled"
                    switch chance.dice(8) {
                    case 0:
                        words.append(.init(number: negative, fate: "later", status: 503, pause: 0))
                        expected[negative] = cancelled ? "cancelled" : "requeued"
                    case 1:
                        words.append(.init(number: negative, fate: "interrupted"))
                        expected[negative] = cancelled ? "failed" : "requeued"
                    case 2:
                        words.append(.returned(negative))
                        expected[negative] = cancelled ? "cancelled" : .some(nil)
                    case 3:
                        words.append(.init(number: negative, fate: "returned", pause: 0))
                        expected[negative] = cancelled ? "cancelled" : "requeued"
                    case 4:
                        words.append(.init(number: negative, fate: "failed", error: "x"))
                        expected[negative] = "failed"
                    case 5:
                        words.append(.init(number: negative, status: 410))
                        expected[negative] = "stale"
                    default:
                        words.append(.accepted(negative))
                        expected[negative] = "accepted"
                    }
                }
                let strangers = known.flatMap { campaign, requests in
                    requests.filter { $0.value.holder != daemon || $0.value.final != nil || $0.value.moved }.keys
                        .sorted().prefix(3).map { -(campaign << 32 | $0) }
                }
                let statement = CampaignStage.finishing(
                    words + strangers.sorted().prefix(5).map { .init(number: $0, fate: "failed", error: "stranger") },
                    by: daemon)
                if chance.dice(5) == 0 { try stage.database.psql("BEGIN; \(statement); ROLLBACK", user: "a_daemon") }
                #expect(
                    try stage.database.psql(statement, user: "a_daemon") == "\(words.count)", "\(what), seed \(seed)")
                try note(what) { _, campaign, number, outcome in
                    expected.removeValue(forKey: -(campaign << 32 | number)) == .some(outcome)
                }
                for (negative, outcome) in expected {
                    #expect(outcome == nil, "\(what): \(negative) has not become \(outcome ?? "")")
                    known[-negative >> 32]![-negative & 0xffff_ffff]!.holder = nil
                }
                if chance.dice(3) == 0 {
                    #expect(try stage.database.psql(statement, user: "a_daemon") == "0", "\(what), again")
                }
            case 10:
                // It dies; another takes over what it has.
                what = "take over \(daemon)"
                let mine = held(by: daemon)
                let sent =
                    chance.dice(3) == 0
                    ? nil
                    : Set(mine.shuffled(using: &chance).prefix(mine.count / 3).map { -($0.campaign << 32 | $0.number) })
                let single = try stage.count("send_request", "claimed_by = '\(daemon)'")
                let interrupted = sent?.count ?? mine.count + single
                #expect(
                    try stage.takeOver(daemon, sent: sent.map(Array.init)) == "\(mine.count + single)|\(interrupted)",
                    "\(what), seed \(seed)")
                try note(what) { request, campaign, number, outcome in
                    let wasSent = sent?.contains(-(campaign << 32 | number)) ?? true
                    let ended = wasSent ? "failed" : "cancelled"
                    if request.moved { return outcome == ended && state[campaign] == "cancelled" }
                    return request.holder == daemon && outcome == (state[campaign] == "cancelled" ? ended : "requeued")
                        && (wasSent || outcome == "cancelled")
                }
                for (campaign, number) in mine where !known[campaign]![number]!.moved {
                    known[campaign]![number]!.holder = nil
                }
                singles = singles.filter { $0.value.holder != daemon }
            case 11:
                what = "single claim by \(daemon)"
                let claimed = try stage.claimSingle(by: daemon, most: 200)
                for (id, token) in claimed {
                    let row = try stage.database.psql(
                        "SELECT campaign_id, campaign_number FROM tokenkeeper.send_request WHERE request_id = \(id)"
                    ).split(separator: "|").map { Int($0)! }
                    let request = known[row[0]]![row[1]]
                    #expect(
                        request?.token == token && request?.moved == true && request?.final == nil
                            && state[row[0]] == "running" && !forgotten.contains(token), "\(what)")
                    #expect(!singles.values.contains { $0.campaign == row[0] && $0.number == row[1] })
                    singles[id] = (row[0], row[1], daemon)
                }
                try note(what) { request, _, _, outcome in
                    request.moved
                        && (outcome == "suppressed" && suppressed.contains(request.token) || outcome == "failed"
                            || outcome == "forgotten" && forgotten.contains(request.token))
                }
            case 12:
                what = "single finish by \(daemon)"
                let mine = singles.filter { $0.value.holder == daemon }
                var expected: [Int: String?] = [:]
                let words = mine.keys.sorted().map { id -> CampaignStage.Word in
                    let cancelled = state[mine[id]!.campaign] == "cancelled"
                    switch chance.dice(5) {
                    case 0:
                        expected[id] = cancelled ? "cancelled" : .some(nil)
                        return .init(number: id, fate: "later", status: 503, pause: 0)
                    case 1:
                        expected[id] = cancelled ? "failed" : .some(nil)
                        return .init(number: id, fate: "interrupted")
                    case 2:
                        expected[id] = "failed"
                        return .init(number: id, fate: "failed", error: "x")
                    default:
                        expected[id] = "accepted"
                        return .accepted(id)
                    }
                }
                try stage.finish(words, by: daemon)
                try note(what) { _, campaign, number, outcome in
                    mine.contains {
                        $0.value.campaign == campaign && $0.value.number == number && expected[$0.key] == .some(outcome)
                    }
                }
                for id in mine.keys { singles[id] = nil }
            case 13:
                guard let campaign = campaigns.randomElement(using: &chance) else { continue }
                let act = ["pause", "resume", "resume", chance.dice(6) == 0 ? "cancel" : "pause"][chance.dice(4)]
                what = "\(act) \(campaign)"
                let done =
                    try stage.database.psql("SELECT tokenkeeper.\(act)_campaign(\(campaign))", user: "a_sender") == "t"
                if done { state[campaign] = act == "pause" ? "paused" : act == "resume" ? "running" : "cancelled" }
                let busy = singles.values.filter { $0.campaign == campaign }.map(\.number)
                try note(what) { request, of, number, outcome in
                    of == campaign && outcome == "cancelled" && act == "cancel" && request.holder == nil
                        && !busy.contains(number)
                }
            case 14:
                let token = 1 + chance.dice(tokens)
                what = "forget \(token)"
                try stage.database.psql("SELECT tokenkeeper.forget('\(CampaignStage.token(token))')", user: "a_app")
                forgotten.insert(token)
                try note(what) { request, _, _, outcome in outcome == "forgotten" && request.token == token }
                for (id, single) in singles where known[single.campaign]![single.number]!.final == "forgotten" {
                    singles[id] = nil
                }
            default:
                let token = 1 + chance.dice(tokens)
                what = "suppress \(token)"
                if !forgotten.contains(token) {
                    try stage.suppress(token)
                    suppressed.insert(token)
                }
            }
            if chance.dice(4) == 0 { try stage.end() }
            try check("step \(step): \(what)")
        }

        // To the end.
        for campaign in campaigns where state[campaign] == "paused" {
            try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(campaign))", user: "a_sender")
        }
        for daemon in ["a", "b", "c"] {
            _ = try stage.takeOver(daemon, sent: [])
            try stage.finish(singles.filter { $0.value.holder == daemon }.keys.map { .returned($0) }, by: daemon)
        }
        for campaign in campaigns {
            try stage.addressAll(campaign)
            while case let more = try stage.claim(campaign), !more.isEmpty {
                try stage.finish(more.keys.map { .accepted($0) })
            }
        }
        while case let more = try stage.claimSingle(), !more.isEmpty {
            try stage.finish(more.keys.map { .accepted($0) })
        }
        try stage.end()
        for campaign in campaigns {
            #expect(["ended", "cancelled"].contains(try stage.state(campaign)), "seed \(seed)")
            #expect(
                try stage.count("campaign", "campaign_id = \(campaign) AND ended_at IS NOT NULL") == 1, "seed \(seed)")
            #expect(try stage.progress(campaign).split(separator: "|")[1] == "0", "seed \(seed)")
        }
        #expect(
            try stage.database.psql(
                """
                SELECT count(*) FROM (
                    SELECT FROM tokenkeeper.campaign_ending AS e, unnest(e.ordinals) AS o WHERE e.outcome <> 'requeued'
                    GROUP BY e.campaign_id, e.batch, o HAVING count(*) > 1) AS twice
                """) == "0")
        #expect(try stage.count("campaign_batch") == 0 && stage.count("send_request") == 0)
    }
}
