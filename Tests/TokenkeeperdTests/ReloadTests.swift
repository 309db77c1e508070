import Dispatch
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import tokenkeeperd

private final class Count: Sendable {
    let runs = Atomic(0)
}

@Suite(.ownThread) struct `A reload` {
    /// Mistakes, each with the beginning of its message.
    static let mistakes: [(text: String, said: String)] = [
        ("[<", "1:2: found '<', expected a key"),
        ("[*]", "1:2: found '*', expected a key"),
        ("[=]", "1:2: found '=', expected a key"),
        ("[,]", "1:2: found ',', expected a key"),
        ("[.sweep]", "1:2: found '.', expected a key"),
        ("[sweep]\n[ä]", "2:2: found 'ä', expected a key"),
        (Array(repeating: "a", count: 20_000).joined(separator: ".") + " = 1", "1:1: found a key of more than 8 parts"),
        (String(repeating: "[", count: 100_000), "1:2: found '[', expected a key"),
        ("[sweep]\ninterval = [[[", "2:13: found '[', expected a text in quotes"),
        ("database_url = postgresql://u:hunter2@h/db", "1:16: found 'p', expected a text in quotes"),
        ("database_url = \"hunter2\nx", "1:24: found the end of the line, expected"),
    ]

    @Test func `a mistake in the file is logged with line and column, and changes nothing`() throws {
        let database = try TestCluster.shared.database()
        let systemd = try NotifyListener()
        let file = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString).toml"
        defer { unlink(file) }
        func write(_ text: String) throws { try text.write(toFile: file, atomically: true, encoding: .utf8) }
        try write("[sweep]\ninterval = \"2h\"\n")
        let daemon = try DaemonProcess(
            database.url(), arguments: ["--config", file], environment: ["NOTIFY_SOCKET": systemd.address])
        try eventually("it is ready") { systemd.count("READY=1") == 1 }
        for (number, mistake) in Self.mistakes.enumerated() {
            try write(mistake.text)
            daemon.signal(SIGHUP)
            try eventually("it is ready again, or has ended") {
                systemd.count("READY=1") == number + 2 || !daemon.isRunning
            }
            try #require(daemon.isRunning, "\(mistake.text.prefix(40)): \(daemon.logged.suffix(200))")
            #expect(daemon.logged.contains("\(file):\(mistake.said)"), "\(mistake.text.prefix(40))")
        }
        #expect(!daemon.logged.contains("hunter2"))
        #expect(!daemon.logged.contains("msg=reloaded"))
        #expect(try database.psql("SELECT sweep_interval FROM tokenkeeper.daemon") == "02:00:00")
        // The next valid file is applied.
        try write("[sweep]\ninterval = \"3h\"\n")
        daemon.signal(SIGHUP)
        try eventually("it reloads") { daemon.logged.contains("sweep.interval: 2h -> 3h") }
        #expect(daemon.stop() == 0)
    }

    @Test func `any number of requests during a reload causes one more reload`() {
        let (begun, mayGoOn, count) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0), Count())
        let queue = DispatchQueue(label: "test")
        let work = CoalescedWork(on: queue) {
            count.runs.add(1, ordering: .sequentiallyConsistent)
            begun.signal()
            mayGoOn.wait()
        }
        work.request()
        begun.wait()
        for _ in 0..<10_000 { work.request() }
        // One for each run that might have been queued.
        for _ in 0...10_000 { mayGoOn.signal() }
        queue.sync {}
        #expect(count.runs.load(ordering: .sequentiallyConsistent) == 2)
        work.request()
        queue.sync {}
        #expect(count.runs.load(ordering: .sequentiallyConsistent) == 3)
    }
}
