import Foundation
import LedgerTestSupport
import Logging
import TestThreads
import Testing

@testable import tokenkeeperd

/// Each line as a JSON object. Fails if a line is none, or has a value that is not a string.
func jsonLines(_ log: String) throws -> [[String: String]] {
    try log.split(separator: "\n").map { line in
        try #require(JSONSerialization.jsonObject(with: Data(line.utf8)) as? [String: String], "\(line)")
    }
}

@Suite(.ownThread) struct `The log` {
    private static let time = Date(timeIntervalSince1970: 1_795_000_000.25)
    /// Quotes, a backslash, the end of a line, a tab, control characters of both blocks, and letters beyond ASCII.
    private static let nasty = "a \"b\" \\ c\nd\te\u{0}\u{1b}[31m\u{9b}\u{7f} é\u{1F600}\u{2028}"

    private func line(
        _ format: LogFormat, _ message: String, _ metadata: Logger.Metadata = [:], toJournal: Bool = false
    )
        -> String
    {
        format.line(at: Self.time, .warning, message, metadata, toJournal: toJournal)
    }

    @Test func `a line of JSON has time, level, message and the fields, whatever is in them`() throws {
        let line = line(.json, Self.nasty, ["topic": "\(Self.nasty)", "error": "", "pid": "\(7)"])
        #expect(
            try jsonLines(line) == [
                [
                    "time": "2026-11-18T11:06:40.250Z", "level": "warning", "message": Self.nasty, "topic": Self.nasty,
                    "error": "", "pid": "7",
                ]
            ])
        #expect(!line.unicodeScalars.contains { $0.properties.generalCategory == .control }, "\(line)")
        #expect(line.hasPrefix("{\"time\":"))
    }

    @Test func `a line for people has no control character either`() {
        #expect(
            line(.logfmt, "all is well", ["topic": "a=b", "pid": "7"])
                == "time=2026-11-18T11:06:40.250Z level=warning msg=\"all is well\" pid=7 topic=\"a=b\"")
        let nasty = line(.logfmt, Self.nasty)
        #expect(!nasty.unicodeScalars.contains { $0.properties.generalCategory == .control }, "\(nasty)")
        #expect(nasty.contains("a \\\"b\\\" \\\\ c\\nd"))
    }

    @Test func `for the journal, a line begins with its priority`() {
        #expect(line(.logfmt, "late", toJournal: true) == "<4>level=warning msg=late")
        #expect(
            line(.json, "late", toJournal: true)
                == "<4>{\"time\":\"2026-11-18T11:06:40.250Z\",\"level\":\"warning\",\"message\":\"late\"}")
    }

    @Test func `a daemon that logs JSON writes nothing else`() throws {
        let database = try TestCluster.shared.database()
        let daemon = try DaemonProcess(database.url(), settings: ["log.format=json", "log.level=trace"])
        try eventually("it works") { (try? database.psql("SELECT live_daemons FROM tokenkeeper.status")) == "1" }
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', repeat('ab', 32), 410, 'no JSON')"
        )
        try eventually("it is recorded") { try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0" }
        #expect(daemon.stop() == 0)
        let lines = try jsonLines(daemon.logged)
        #expect(lines.first?["message"] == "started" && lines.last?["message"] == "stopped", "\(lines)")
        #expect(lines.allSatisfy { $0["time"] != nil && $0["level"] != nil })
        #expect(lines.first?["daemon_id"] != nil)
        #expect(!daemon.logged.contains(String(repeating: "ab", count: 32)), "no token is whole")
    }
}
