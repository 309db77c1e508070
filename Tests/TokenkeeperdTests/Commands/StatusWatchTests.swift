import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

@Suite(.ownThread) struct `The status on a terminal` {
    private let report = StatusReport(
        json: "{}", fields: [.init(name: "queue_depth", kind: .number, value: "7")],
        warnings: ["results have been waiting for longer than five minutes"], criticalWarnings: [])

    @Test func `a frame fits the terminal and says what it leaves out`() {
        var view = StatusView()
        view.show(report, at: "NOON")
        let wide = view.frame(width: 80, height: 24, at: "NOON")
        #expect(
            wide == [
                "tokenkeeperd status, NOON; q quits", "",
                "warning: results have been waiting for longer than five minutes", "queue depth  7",
            ])
        let narrow = view.frame(width: 30, height: 24, at: "NOON")
        #expect(narrow.allSatisfy { $0.count <= 30 } && narrow.contains("    five minutes"), "\(narrow)")
        let low = view.frame(width: 80, height: 3, at: "NOON")
        #expect(low.count == 3 && low.last == "… 2 more lines: make the window higher")
        for width in 1...9 { #expect(!view.frame(width: width, height: 1, at: "NOON").isEmpty) }
    }

    @Test func `each number has its own time, and running campaigns a bar`() throws {
        let report = StatusReport(
            json: "{}",
            fields: [
                .init(name: "queue_depth", kind: .number, value: "7"),
                .init(name: "queue_as_of", kind: .text, value: "2026-11-28 12:00:01 UTC"),
                .init(name: "requests", kind: .number, value: "123456"),
                .init(name: "requests_as_of", kind: .text, value: "2026-11-28 11:59:00 UTC"),
                .init(name: "results_per_second", kind: .number, value: "81.2"),
                .init(name: "live_daemons", kind: .number, value: "2"),
                .init(name: "as_of", kind: .text, value: "2026-11-28 12:00:02 UTC"),
            ], warnings: [], criticalWarnings: [])
        #expect(
            StatusText.lines(report) == [
                "results per second  81.2    as of 2026-11-28 12:00:01 UTC",
                "queue depth         7       as of 2026-11-28 12:00:01 UTC",
                "requests            123456  as of 2026-11-28 11:59:00 UTC",
                "live daemons        2       as of 2026-11-28 12:00:02 UTC",
            ])
        var campaign = CampaignProgress(
            number: 7, name: "Mars", environment: "production", topic: "t", state: "running", audience: "everyone",
            expected: 4000, isAddressed: false, addressed: 2000, waiting: 1000, ended: [990, 10, 0, 0, 0, 0, 0],
            perSecond: 12.6, expectedEnd: "2026-11-28 12:04:00 UTC", createdAt: "", createdBy: "a_sender",
            scheduledAt: nil, startedAt: nil, endedAt: nil, waitsBecause: nil)
        var view = StatusView()
        view.show(report, [campaign], at: "NOON")
        #expect(
            view.frame(width: 120, height: 24, at: "NOON")[2]
                == "campaign 7 \"Mars\"  [=======                       ]  25 %  1000 requests  12/s, ends at about 2026-11-28 12:04:00 UTC"
        )
        campaign.waitsBecause = "no running daemon sends"
        view.show(report, [campaign], at: "NOON")
        #expect(view.frame(width: 60, height: 24, at: "NOON").allSatisfy { $0.count <= 60 })
        #expect(view.frame(width: 99, height: 24, at: "NOON")[2].hasSuffix("no running daemon sends"))
    }

    @Test func `an outage is shown above the last status, with its beginning`() {
        var view = StatusView()
        view.fail("refused", at: "11:00")
        #expect(view.frame(width: 80, height: 9, at: "11:01").last == "NO STATUS since 11:00: refused; trying again")
        view.show(report, at: "11:02")
        view.fail("gone", at: "11:04")
        view.fail("still gone", at: "11:06")
        let frame = view.frame(width: 80, height: 24, at: "11:07")
        #expect(frame[2] == "NO STATUS since 11:04: still gone; trying again" && frame[3] == "Before, at 11:02:")
        #expect(frame.last == "queue depth  7")
        view.show(report, at: "11:08")
        #expect(!view.frame(width: 80, height: 24, at: "11:08").contains { $0.hasPrefix("NO STATUS") })
    }

    @Test func `long words are cut, and no character is lost`() {
        let word = String(repeating: "x", count: 95)
        #expect(StatusView.wrapped(word, width: 20).joined() == word)
        #expect(StatusView.wrapped("a b c", width: 1).joined() == "abc")
        #expect(StatusView.wrapped("", width: 20) == [""])
    }

    @Test func `it needs a terminal`() throws {
        let database = try TestCluster.shared.database()
        let refused = try database.command("status", "--watch", as: "a_reader")
        #expect(refused.status == 64 && refused.errors.contains("--watch draws on a terminal"), "\(refused)")
        #expect(try database.command("status", "--watch", "--json", as: "a_reader").status == 64)
        #expect(try database.command("status", "--interval", "0", as: "a_reader").status == 64)
    }

    /// The real command on a pseudoterminal, which `script` makes.
    private func watch(_ database: TestDatabase, _ body: (FileHandle, () -> String, Process) throws -> Void) throws {
        let file = NSTemporaryDirectory() + "watch-\(UUID().uuidString)"
        defer { try? FileManager.default.removeItem(atPath: file) }
        let process = Process()
        process.executableURL = URL(fileURLWithPath: "/usr/bin/script")
        process.arguments = [
            "-qefc", "stty rows 12 cols 60; exec \(DaemonProcess.program) status --watch --interval 1", file,
        ]
        process.environment = ProcessInfo.processInfo.environment.merging([
            "TOKENKEEPER_DATABASE_URL": database.url(user: "a_reader")
        ]) { $1 }
        let input = Pipe()
        process.standardInput = input
        process.standardOutput = FileHandle.nullDevice
        try process.run()
        defer { if process.isRunning { process.terminate() } }
        try body(input.fileHandleForWriting, { (try? String(contentsOfFile: file, encoding: .utf8)) ?? "" }, process)
    }

    private static let restored = "\u{1B}[?7h\u{1B}[?25h\u{1B}[?1049l"

    @Test(arguments: ["q", "\u{3}"])
    func `it redraws, survives a restart of the database, and restores the terminal`(key: String) throws {
        let cluster = try TestCluster.prepared()
        let database = try cluster.database()
        try watch(database) { input, shown, process in
            try eventually("it shows the status") { shown().contains("no daemon has ever run") }
            #expect(shown().contains("\u{1B}[?1049h") && !shown().contains(Self.restored))
            cluster.stop()
            try eventually("it says that there is no status") { shown().contains("NO STATUS since") }
            try cluster.start()
            try eventually("it goes on") {
                let parts = shown().components(separatedBy: "NO STATUS since")
                return parts.last?.contains("\u{1B}[H") == true
                    && parts.last?.contains("no daemon has ever run") == true
                    && parts.last?.components(separatedBy: "\u{1B}[H").last?.contains("queue") != nil
            }
            try input.write(contentsOf: Data(key.utf8))
            process.waitUntilExit()
            #expect(process.terminationStatus == 0)
            #expect(shown().contains(Self.restored))
        }
    }
}
