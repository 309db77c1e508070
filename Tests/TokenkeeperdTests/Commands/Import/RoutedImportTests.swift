import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// `tokenkeeperd import` with the database of a router, and with that of one shard.
@Suite(.ownThread) struct `Command import on shards` {
    private let stage: TestShards
    private let folder: TemporaryDirectory
    private var router: TestDatabase { stage.routers[0] }
    private var file: String { "\(folder.path)/devices.csv" }

    /// 200 rows with a token in hex, 200 with one that the database has to read, and 40 that are refused for one of two reasons.
    init() throws {
        stage = try TestShards()
        folder = try TemporaryDirectory()
        var text = "token,registered_at,device_id\n"
        for number in 1...440 {
            let digits = String(number, radix: 16)
            let token = String(repeating: "0", count: 64 - digits.count) + digits
            switch number % 22 {
            case 0: text += "nothex,1735786800,d\(number)\n"
            case 11: text += "\(token),never,d\(number)\n"
            case let other where other.isMultiple(of: 2): text += "\(token),1735786800,d\(number)\n"
            default:
                let groups = stride(from: 0, to: 64, by: 8).map { token.dropFirst($0).prefix(8).uppercased() }
                text += "<\(groups.joined(separator: " "))>,1735786800,d\(number)\n"
            }
        }
        _ = try folder.write(text, to: "devices.csv")
    }

    private func run(_ database: TestDatabase, _ more: String...) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "import", file, "--format", "csv", "--topic", "t"] + more,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")])
    }

    /// The rows in the queue of each shard: all, and those whose tokens belong there.
    private func queued() throws -> [(all: Int, own: Int)] {
        try stage.shards.enumerated().map { number, shard in
            let counts = try shard.psql(
                "SELECT count(*), count(*) FILTER (WHERE tokenkeeper.shard_of(token, 4) = \(number)) FROM tokenkeeper.registration"
            ).split(separator: "|").compactMap { Int($0) }
            return (counts[0], counts[1])
        }
    }

    private func refused() throws -> Int {
        try String(contentsOfFile: "\(file).rejected", encoding: .utf8).split(separator: "\n").count - 1
    }

    @Test func `each row of a file goes to its shard, and what is refused is refused once`() throws {
        let dry = try run(router, "--dry-run")
        #expect(dry.status == 1 && dry.output.contains("440 rows; would queue 400, refuse 40, skip 0"), "\(dry)")
        let whole = try run(router)
        #expect(whole.status == 1 && whole.errors == "", "\(whole)")
        let counts = try queued()
        #expect(counts.map(\.all) == counts.map(\.own) && counts.map(\.all).reduce(0, +) == 400, "\(counts)")
        #expect(counts.allSatisfy { $0.all > 50 }, "\(counts)")
        #expect(try refused() == 40)
        for (number, count) in counts.enumerated() {
            let refused = number == 0 ? 40 : 0
            #expect(
                whole.output.contains(
                    "shard \(number): \(file): 440 rows; queued \(count.all), refused \(refused), skipped \(440 - count.all - refused)\n"
                ), "\(whole)")
        }
        #expect(whole.output.components(separatedBy: "to undo, on the database of this shard: ").count == 5)
        // A file that was imported before is imported again, on all shards.
        try FileManager.default.removeItem(atPath: "\(file).rejected")
        #expect(try run(router).status == 1)
        #expect(try queued().map(\.all) == counts.map { 2 * $0.all })
        let pipe = try ProgramRun(
            [
                DaemonProcess.program, "import", "-", "--format", "csv", "--topic", "t", "--as-of", "2026-01-01Z",
                "--rejects", "\(folder.path)/pipe",
            ], input: "token\naabb\n", environment: ["TOKENKEEPER_DATABASE_URL": router.url(user: "a_app")])
        #expect(pipe.status == 70 && pipe.errors.contains("- can be read only once"), "\(pipe)")
    }

    @Test func `an import that one shard interrupts continues there, and queues every row once`() throws {
        try stage.shards[2].psql(
            """
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'the disk is full'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON tokenkeeper.registration FOR EACH ROW EXECUTE FUNCTION public.refuse()
            """)
        let partly = try run(router)
        #expect(partly.status == 69, "\(partly)")
        #expect(partly.errors.contains("shard 2: ") && partly.errors.contains("the disk is full"), "\(partly)")
        #expect(partly.output.contains("shard 0: ") && partly.output.contains("shard 1: "), "\(partly)")
        let before = try queued().map(\.all)
        #expect(before[0] > 0 && before[1] > 0 && before[2] == 0 && before[3] == 0, "\(before)")
        try stage.shards[2].psql("DROP TRIGGER refuse ON tokenkeeper.registration")
        let rest = try run(router)
        #expect(rest.status == 0 && rest.errors.contains("shard 2: continuing source 1 after"), "\(rest)")
        #expect(!rest.output.contains("shard 0: ") && !rest.output.contains("shard 1: "), "\(rest)")
        let after = try queued()
        #expect(
            after.prefix(2).map(\.all) == Array(before.prefix(2)) && after.map(\.all).reduce(0, +) == 400, "\(after)")
        #expect(after.map(\.all) == after.map(\.own))
        #expect(try refused() == 40)
    }

    @Test func `an import that is killed continues with the shard that it had reached, and queues every row once`()
        throws
    {
        let usual = ["import", file, "--format", "csv", "--topic", "t"]
        for shard in [1, 3] {
            // Its rows wait for this lock.
            try stage.shards[shard].psql(
                """
                CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END $$;
                CREATE TRIGGER wait BEFORE INSERT ON tokenkeeper.registration FOR EACH ROW EXECUTE FUNCTION public.wait()
                """)
            var holder = try stage.shards[shard].connect()
            try holder.execute("SELECT pg_advisory_lock(1)")
            let process = Process()
            process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
            process.arguments = usual
            process.environment = ["TOKENKEEPER_DATABASE_URL": router.url(user: "a_app")]
            process.standardError = FileHandle.nullDevice
            process.standardOutput = FileHandle.nullDevice
            try process.run()
            try eventually("it waits for shard \(shard)") {
                try stage.shards[shard].psql(
                    "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)") == "t"
            }
            kill(process.processIdentifier, SIGKILL)
            process.waitUntilExit()
            #expect(process.terminationReason == .uncaughtSignal)
            let reached = try queued().map(\.all)
            #expect(reached[shard - 1] > 50 && reached[shard] == 0, "\(reached)")
            try holder.execute("SELECT pg_advisory_unlock(1)")
            try stage.shards[shard].psql("DROP FUNCTION public.wait CASCADE")
        }
        let rest = try run(router)
        #expect(rest.status == 0 && rest.errors.contains("shard 3: continuing source 1"), "\(rest)")
        let counts = try queued()
        #expect(counts.map(\.all) == counts.map(\.own) && counts.map(\.all).reduce(0, +) == 400, "\(counts)")
        #expect(try refused() == 40)
        for shard in stage.shards {
            #expect(try shard.psql("SELECT count(*), count(finished_at) FROM tokenkeeper.registration_source") == "1|1")
        }
    }

    @Test func `nothing is imported while a shard does not answer`() throws {
        try stage.withShardDown(3) {
            let failed = try run(router)
            #expect(failed.status == 69 && failed.errors.contains("shard 3: "), "\(failed)")
        }
        #expect(try queued().allSatisfy { $0.all == 0 })
        #expect(!FileManager.default.fileExists(atPath: "\(file).rejected"))
    }

    @Test func `an import into one shard skips the rows of the others`() throws {
        let one = try run(stage.shards[1])
        let counts = try queued()
        #expect(counts[1].all == counts[1].own && counts[1].all > 50 && counts[0].all == 0, "\(counts)")
        #expect(one.output.contains("  skipped \(400 - counts[1].all): of another shard\n"), "\(one)")
        #expect(one.output.contains("refused 40"), "\(one)")
    }
}
