import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `Deciding about a topic from the command line` {
    private let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')", user: "a_app")
    }

    private func run(_ command: String...) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "topic"] + command,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")])
    }

    @Test func `observe, enforce, rate, pause and resume show in the list`() throws {
        func list() throws -> String { try run("list").output }
        #expect(try list() == "com.example.app (production): gate enforces\n")
        #expect(
            try run("observe", "com.example.app").output == "the gate of com.example.app (production) observes\n")
        #expect(
            try run("rate", "com.example.app", "500").output
                == "the rate of com.example.app (production) is at most 500 requests a second\n")
        #expect(try run("pause", "com.example.app", "--reason", "lunch").status == 0)
        #expect(
            try list()
                == "com.example.app (production): gate observes; at most 500 a second; paused: lunch\n")
        #expect(
            try run("list", "--json").output
                == #"[{"environment":"production","gate":"observe","max_per_second":500,"paused":"lunch","topic":"com.example.app"}]"#
                + "\n")
        for command in [["enforce"], ["resume"]] {
            #expect(try run(command[0], "com.example.app").status == 0)
        }
        #expect(try run("rate", "com.example.app", "none").status == 0)
        #expect(try list() == "com.example.app (production): gate enforces\n")
    }

    @Test(arguments: ["observe", "enforce", "rate"])
    func `an unknown topic is refused, and the nearest is named`(command: String) throws {
        let rate = command == "rate" ? ["5"] : []
        func refused(_ topic: String) throws -> ProgramRun {
            let run = try ProgramRun(
                [DaemonProcess.program, "topic", command, topic] + rate,
                environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")])
            #expect(run.status == 64 && run.output.isEmpty, "\(run)")
            return run
        }
        #expect(try refused("com.exmaple.app").errors.contains("Did you mean com.example.app?"))
        #expect(try refused("org.other").errors.contains("`tokenkeeperd topic list` has the known topics."))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic") == "1")
    }

    @Test func `a new topic observes if one says that it is new`() throws {
        for _ in 1...2 {
            #expect(try run("observe", "com.example.next", "--environment", "sandbox", "--new").status == 0)
        }
        #expect(
            try database.psql("SELECT environment, gate FROM tokenkeeper.topic WHERE topic = 'com.example.next'")
                == "sandbox|observe")
        for rate in ["0", "-1", "many"] { #expect(try run("rate", "--", "com.example.app", rate).status == 64) }
    }
}
