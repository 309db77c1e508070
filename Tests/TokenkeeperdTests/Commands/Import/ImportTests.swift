import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing
import TokenLedger

@Suite(.ownThread) struct `Command import` {
    private func run(
        _ arguments: [String], on database: TestDatabase, as user: String = "a_app", input: String? = nil
    ) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "import"] + arguments, input: input,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
    }

    private let usual = ["--format", "csv", "--topic", "t"]

    /// Takes the place of a daemon: keeps what is queued, so that nobody waits for the queue.
    private func keeping(in database: TestDatabase, _ work: () throws -> Void) throws {
        try database.psql("CREATE TABLE kept (LIKE tokenkeeper.registration)")
        let move = "WITH gone AS (DELETE FROM tokenkeeper.registration RETURNING *) INSERT INTO kept SELECT * FROM gone"
        let isOver = Flag()
        let done = DispatchSemaphore(value: 0)
        let url = database.url(user: "owner")
        Thread.detachNewThread {
            while !isOver.isSet, (try? TestCluster.run(["psql", "-XAtq", "-d", url, "-c", move])) != nil {}
            done.signal()
        }
        defer {
            isOver.set()
            done.wait()
        }
        try work()
        try eventually("everything is kept") { try database.psql("SELECT tokenkeeper.queued_registrations(1)") == "0" }
    }

    private final class Flag: @unchecked Sendable {  // The only property is behind the lock.
        private let lock = NSLock()
        private var value = false

        var isSet: Bool { lock.withLock { value } }
        func set() { lock.withLock { value = true } }
    }

    /// Lines of which a thousand are broken, in one of several ways.
    ///
    /// - Parameter repeats: Whether one in twenty of the others has the token of another line, with another instant and perhaps another device, or is a
    ///   second token of another line's device.
    private static func file(lines: Int, repeats: Bool = false, to path: String) throws {
        _ = FileManager.default.createFile(atPath: path, contents: nil)
        let file = try FileHandle(forWritingTo: URL(fileURLWithPath: path))
        var text = "token,registered_at,device_id,note\n"
        let step = lines / 1000
        for line in 1...lines {
            if line % step == step / 2 {
                text +=
                    [
                        ",1735786800,d,\(line)\n", "nothex,1735786800,d,\(line)\n", "aabb,never,d,\(line)\n",
                        "aabb,1735786800,\"d,\(line)\n", "aabb,\(line)\n",
                    ][line / step % 5]
            } else {
                let other = repeats && line % 20 == 13 ? line - 5 : line
                let token = String(line % 40 == 13 ? other : line, radix: 16)
                let device = line % 80 == 13 ? line : other
                let at = 1_735_786_800 + (repeats ? line * 7919 % lines : line)
                text += String(repeating: "0", count: 64 - token.count) + token + ",\(at),d\(device),\n"
            }
            if text.utf8.count > 1 << 20 || line == lines {
                try file.write(contentsOf: Data(text.utf8))
                text = ""
            }
        }
        try file.close()
    }

    private static let kept = """
        SELECT count(*), count(DISTINCT token), md5(string_agg(concat_ws('|', environment, topic, token, registered_at, device_id), ',' ORDER BY token))
        FROM kept
        """

    @Test func `an import that is killed again and again queues every row once, and refuses every broken line once`()
        throws
    {
        // Several batches between two kills.
        let lines = Soak.size(100_000, whole: 400_000)
        let folder = try TemporaryDirectory()
        let file = "\(folder.path)/devices.csv"
        try Self.file(lines: lines, to: file)
        let (undisturbed, killed) = (try TestCluster.shared.database(), try TestCluster.shared.database())
        try keeping(in: undisturbed) {
            let whole = try run([file, "--rejects", "\(folder.path)/whole"] + usual, on: undisturbed)
            #expect(
                whole.output.contains("\(lines) rows; queued \(lines - 1000), refused 1000"),
                "\(whole.output)\(whole.errors)")
        }
        var kills = 0
        try keeping(in: killed) {
            for share in [1, 2, 3] {
                let process = Process()
                process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
                process.arguments = ["import", file] + usual
                process.environment = ["TOKENKEEPER_DATABASE_URL": killed.url(user: "a_app")]
                process.standardError = FileHandle.nullDevice
                process.standardOutput = FileHandle.nullDevice
                try process.run()
                try eventually("a part is queued") {
                    let queued = try Int(
                        killed.psql("SELECT coalesce(sum(queued), 0) FROM tokenkeeper.registration_source"))
                    return queued ?? 0 >= lines * share / 4 || !process.isRunning
                }
                kill(process.processIdentifier, SIGKILL)
                process.waitUntilExit()
                if process.terminationReason == .uncaughtSignal { kills += 1 }
            }
            let rest = try run([file] + usual, on: killed)
            #expect(rest.status == 1 && rest.errors.contains("continuing source 1 after"), "\(rest.errors)")
            #expect(rest.output.contains("\(lines) rows; queued \(lines - 1000), refused 1000"), "\(rest.output)")
        }
        #expect(kills == 3)
        #expect(try killed.psql(Self.kept) == undisturbed.psql(Self.kept))
        #expect(try killed.psql(Self.kept).hasPrefix("\(lines - 1000)|\(lines - 1000)|"))
        let rejects = try String(contentsOfFile: file + ".rejected", encoding: .utf8)
        #expect(try rejects == String(contentsOfFile: "\(folder.path)/whole", encoding: .utf8))
        #expect(rejects.split(separator: "\n").count == 1001)
        #expect(try killed.psql("SELECT count(*), count(finished_at) FROM tokenkeeper.registration_source") == "1|1")
    }

    /// Everything that the ledger says about tokens.
    private static let ledger = """
        SELECT count(*), count(*) FILTER (WHERE state = 'superseded'),
               md5(string_agg(concat_ws('|', environment, topic, token, state, registered_at, invalidated_at, device_id), ',' ORDER BY environment, topic, token))
        FROM tokenkeeper.token
        """

    @Test func `an import that is killed halfway leaves the ledger and the refused lines of an undisturbed one`() throws
    {
        // At least three batches.
        let lines = Soak.size(50_000, whole: 150_000)
        let folder = try TemporaryDirectory()
        let file = "\(folder.path)/devices.csv"
        try Self.file(lines: lines, repeats: true, to: file)
        let (undisturbed, killed) = (try TestCluster.shared.database(), try TestCluster.shared.database())
        // The daemons apply what is queued meanwhile.
        // What the guard holds of a file whose rows repeat depends on the batches.
        let daemons = try [undisturbed, killed].map {
            try DaemonProcess($0.url(), settings: ["guard.max_share=100%"])
        }
        let whole = try run([file, "--rejects", "\(folder.path)/whole"] + usual, on: undisturbed)
        #expect(whole.output.contains("\(lines) rows; queued \(lines - 1000), refused 1000"), "\(whole)")

        let process = Process()
        process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
        process.arguments = ["import", file] + usual
        process.environment = ["TOKENKEEPER_DATABASE_URL": killed.url(user: "a_app")]
        process.standardError = FileHandle.nullDevice
        process.standardOutput = FileHandle.nullDevice
        try process.run()
        try eventually("a part is queued") {
            let queued = try Int(killed.psql("SELECT coalesce(sum(queued), 0) FROM tokenkeeper.registration_source"))
            return queued ?? 0 >= lines * 2 / 5 - 1000 || !process.isRunning
        }
        kill(process.processIdentifier, SIGKILL)
        process.waitUntilExit()
        #expect(process.terminationReason == .uncaughtSignal)
        let rest = try run([file] + usual, on: killed)
        #expect(rest.errors.contains("continuing source 1 after"), "\(rest)")
        #expect(rest.output.contains("\(lines) rows; queued \(lines - 1000), refused 1000"), "\(rest)")

        for database in [undisturbed, killed] {
            try eventually("everything is applied") {
                try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0"
            }
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
        // A daemon applies two batches at once.
        for database in [undisturbed, killed] { try database.psql(LedgerModel.settle) }
        let ledger = try killed.psql(Self.ledger)
        print("the ledger: \(ledger)")
        #expect(try ledger == undisturbed.psql(Self.ledger))
        // The header is line 0.
        let step = lines / 1000
        let broken = try String(contentsOfFile: file, encoding: .utf8).split(separator: "\n").enumerated().filter {
            $0.offset % step == step / 2
        }
        let rejects = try String(contentsOfFile: file + ".rejected", encoding: .utf8)
        #expect(broken.count == 1000)
        #expect(try rejects == String(contentsOfFile: "\(folder.path)/whole", encoding: .utf8))
        #expect(rejects.split(separator: "\n").count == 1001)
        for (refused, line) in zip(rejects.split(separator: "\n").dropFirst(), broken) {
            #expect(refused.contains(line.element), "\(refused)")
        }
        #expect(
            try killed.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "0",
            "what is queued can be applied")
    }

    @Test func `Ctrl-C ends an import, which says how to continue, also if it reads from a pipe`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let process = Process()
        process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
        process.arguments = ["import", "-", "--as-of", "2025-01-01", "--rejects", "\(folder.path)/rejects"] + usual
        process.environment = ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")]
        let (input, output) = (Pipe(), Pipe())
        process.standardInput = input
        process.standardOutput = output
        process.standardError = FileHandle.nullDevice
        try process.run()
        try input.fileHandleForWriting.write(contentsOf: Data("token\naa\n".utf8))
        try eventually("it has begun") {
            try database.psql("SELECT count(*) FROM tokenkeeper.registration_source") == "1"
        }
        kill(process.processIdentifier, SIGINT)
        let text = String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        process.waitUntilExit()
        #expect(process.terminationStatus == 70 && text.contains("interrupted"), "\(text)")
    }

    @Test func `importing a file twice queues the same instants, and a file that has changed is a new import`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\n<bb>\n", to: "f.csv")
        for _ in 0..<2 { #expect(try run([file] + usual, on: database).status == 0) }
        #expect(
            try database.psql(
                "SELECT token, count(*), count(DISTINCT registered_at), count(DISTINCT source_id) FROM tokenkeeper.registration GROUP BY 1 ORDER BY 1"
            )
                == "aa|2|1|2\nbb|2|1|2")
        try database.psql("UPDATE tokenkeeper.registration_source SET finished_at = NULL WHERE source_id = 2")
        _ = try folder.write("token\naa\n<bb>\ncc\n", to: "f.csv")
        let changed = try run([file] + usual, on: database)
        #expect(
            changed.status == 0 && changed.errors.contains("source 2, an import of")
                && changed.errors.contains("is a new import"))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration WHERE source_id = 3") == "3")
    }

    @Test func `a positive flag logs out those who are not active, and a dry run shows how many and what no row has`()
        throws
    {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write(
            """
            {"token":"aa","isActive":true,"lastSeen":"2025-10-01T10:00:00Z","active":false}
            {"token":"bb","isActive":"false","lastSeen":"2025-10-01T10:00:00Z"}

            """, to: "f.json")
        let arguments = [
            file, "--format", "json", "--topic", "t", "--column", "active=isActive", "--column",
            "registered_at=lastseen",
        ]
        let dry = try run(arguments + ["--dry-run"], on: database)
        for words in [
            "registered_at: in 0 of 2 rows", "active: in 2 of 2 rows", "logs out 1 token", "tokens of 2 hex digits: 2",
            "not read: lastSeen, active",
        ] {
            #expect(dry.output.contains(words), "\(dry.output)")
        }
        let imported = try run(arguments, on: database)
        // What the import has done is no less than what the dry run has said.
        #expect(
            imported.output.split(separator: "\n").dropFirst().dropLast()
                == dry.output.split(separator: "\n").dropFirst())
        #expect(
            imported.status == 0 && imported.output.contains("warning: registered_at is in none of 2 rows"),
            "\(imported)")
        #expect(
            try database.psql("SELECT token, unregistered FROM tokenkeeper.registration ORDER BY 1") == "aa|f\nbb|t")
    }

    @Test func `times before APNs, a whole document and lines of CR are no rows`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let times = try folder.write(
            "token,registered_at\naa,780000000.123\nbb,45931.4167\ncc,1999-01-01\ndd,2025-01-01\n", to: "f.csv")
        let refused = try run([times, "--dry-run"] + usual, on: database)
        #expect(refused.output.contains("would queue 1, refuse 3"), "\(refused.output)")
        #expect(refused.output.contains("seconds since 2001") && refused.output.contains("days since 1899"))
        for (text, format, words) in [
            ("{\n\"Endpoints\":[]}\n", "json", "one JSON object"),
            ("{\"Endpoints\":[\n  {\"Token\":\"aa\"}]}\n", "json", "one JSON object"),
            ("{ \"results\": [ {\"token\":\"aa\"}]}", "json", "one JSON object"),
            ("{\n\"token\":\"aa\"\n}\n{\n\"token\":\"bb\"\n}\n", "json", "jq -c .\n"),
            ("{\n\"token\":\"aa\"\n}\n", "json", "jq -c .\n"),
            ("token\raa\rbb\r", "csv", "end with CR only"),
        ] {
            let file = try folder.write(text, to: "g")
            let told = try run([file, "--format", format, "--topic", "t"], on: database)
            #expect(told.status == 70 && told.errors.contains(words), "\(told)")
        }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration_source") == "0")
    }

    @Test func `a dry run writes nothing`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\nzz\n", to: "f.csv")
        let dry = try run([file, "--dry-run"] + usual, on: database)
        #expect(
            dry.status == 1 && dry.output.contains("would queue 1, refuse 1")
                && dry.output.contains("line 3: token is 'zz'"))
        #expect(
            try database.psql(
                "SELECT (SELECT count(*) FROM tokenkeeper.registration), (SELECT count(*) FROM tokenkeeper.registration_source)"
            )
                == "0|0")
        #expect(try FileManager.default.contentsOfDirectory(atPath: folder.path) == ["f.csv"])
    }

    @Test func `what would lose something is refused before it begins`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\n", to: "f.csv")
        _ = try folder.write("", to: "f.csv.rejected")
        let existing = try run([file] + usual, on: database)
        #expect(existing.status == 70 && existing.errors.contains("f.csv.rejected exists"), "\(existing.errors)")
        let input = try run(["-"] + usual, on: database, input: "token\naa\n")
        #expect(input.status == 64 && input.errors.contains("--rejects"))
        let timeless = try run(["-", "--rejects", "\(folder.path)/r"] + usual, on: database, input: "token\naa\n")
        #expect(timeless.status == 64 && timeless.errors.contains("--as-of"))
        let missing = try run(["\(folder.path)/none"] + usual, on: database)
        #expect(missing.status == 70 && missing.errors.contains("No such file"), "\(missing.errors)")
        let sender = try run([file, "--rejects", "\(folder.path)/r"] + usual, on: database, as: "a_sender")
        #expect(
            sender.status == 69 && sender.errors.contains("needs the rights of tokenkeeper_app"), "\(sender.errors)")
        let app = try run(
            [file, "--rejects", "\(folder.path)/r", "--feedback"] + usual, on: database)
        #expect(app.status == 69 && app.errors.contains("tokenkeeper_app and tokenkeeper_sender"), "\(app.errors)")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration_source") == "0")
    }

    @Test func `an import cannot continue without the rows that it has refused`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\nzz\naa\n", to: "f.csv")
        #expect(try run([file] + usual, on: database).status == 1)
        try database.psql("UPDATE tokenkeeper.registration_source SET finished_at = NULL")
        try FileManager.default.removeItem(atPath: file + ".rejected")
        let gone = try run([file] + usual, on: database)
        #expect(gone.status == 70 && gone.errors.contains("--restart"), "\(gone.errors)")
        let again = try run([file, "--restart"] + usual, on: database)
        #expect(again.status == 1 && again.output.contains("queued 1, refused 1"), "\(again.output)\(again.errors)")
    }

    @Test func `what was written to the file of refused rows after the last commit is written again, and not twice`()
        throws
    {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\nzz\nyy\naa\n", to: "f.csv")
        #expect(try run([file] + usual, on: database).status == 1)
        let rejects = try String(contentsOfFile: file + ".rejected", encoding: .utf8)
        let first = rejects.split(separator: "\n").prefix(2).joined(separator: "\n").utf8.count + 1
        // As after a kill before the commit of the batch: at the beginning of the file, and after its first refused row.
        for position in [
            "offset=0 lines=0 records=0 skipped=0 rejects=0", "offset=9 lines=2 records=1 skipped=0 rejects=\(first)",
        ] {
            try goBack(to: position, in: database)
            let rest = try run([file] + usual, on: database)
            #expect(rest.status == 1 && rest.errors.contains("continuing source 1"), "\(rest.errors)")
            #expect(try String(contentsOfFile: file + ".rejected", encoding: .utf8) == rejects)
        }
    }

    private func goBack(to position: String, in database: TestDatabase) throws {
        try database.psql(
            """
            UPDATE tokenkeeper.registration_source
            SET finished_at = NULL, position = regexp_replace(position, 'offset=.*', '\(position)')
            """)
    }

    @Test func `an import that continues keeps what another import has refused`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\nzz\naa\n", to: "f.csv")
        #expect(try run([file] + usual, on: database).status == 1)
        let rejects = try String(contentsOfFile: file + ".rejected", encoding: .utf8)
        try goBack(to: "offset=0 lines=0 records=0 skipped=0 rejects=0", in: database)
        _ = try folder.write("of another", to: "f.csv.rejected")
        let refused = try run([file] + usual, on: database)
        #expect(refused.status == 70 && refused.errors.contains("another import has refused: move it away"))
        #expect(refused.errors.contains("run the same command again to continue source 1"), "\(refused)")
        #expect(try String(contentsOfFile: file + ".rejected", encoding: .utf8) == "of another")
        try FileManager.default.removeItem(atPath: file + ".rejected")
        let rest = try run([file] + usual, on: database)
        #expect(rest.status == 1 && rest.errors.contains("continuing source 1"), "\(rest.errors)")
        #expect(try String(contentsOfFile: file + ".rejected", encoding: .utf8) == rejects)
    }

    @Test func `two processes do not import one file at once`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\n", to: "f.csv")
        let descriptor = open(file, O_RDONLY)
        defer { close(descriptor) }
        #expect(flock(descriptor, LOCK_EX) == 0)
        let second = try run([file] + usual, on: database)
        #expect(second.status == 70 && second.errors.contains("another process imports"), "\(second.errors)")
    }

    @Test func `a batch that the server refuses is neither queued nor counted`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\n", to: "f.csv")
        try database.psql("ALTER TABLE tokenkeeper.registration ADD CONSTRAINT no_aa CHECK (token <> 'aa')")
        let refused = try run([file] + usual, on: database)
        #expect(refused.status == 69 && refused.errors.contains("run the same command again"), "\(refused.errors)")
        try database.psql("ALTER TABLE tokenkeeper.registration DROP CONSTRAINT no_aa")
        // Nor is it queued if it cannot be noted how far the import has come.
        try database.psql("ALTER TABLE tokenkeeper.registration_source ADD CONSTRAINT none CHECK (queued = 0)")
        #expect(try run([file] + usual, on: database).status == 69)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0")
        try database.psql("ALTER TABLE tokenkeeper.registration_source DROP CONSTRAINT none")
        let rest = try run([file] + usual, on: database)
        #expect(rest.status == 0 && rest.errors.contains("continuing source 1"), "\(rest.errors)")
        #expect(try database.psql("SELECT token, source_id FROM tokenkeeper.registration") == "aa|1")
    }

    @Test func `a file that cannot be imported at all is refused before anything has begun`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let token = String(repeating: "ab", count: 32)
        func refusal(_ bytes: [UInt8], _ arguments: [String]) throws -> String {
            try Data(bytes).write(to: URL(fileURLWithPath: "\(folder.path)/f"))
            let rehearsal = try run(["\(folder.path)/f", "--dry-run"] + arguments, on: database)
            let whole = try run(["\(folder.path)/f"] + arguments, on: database)
            #expect(
                whole.status == 70 && whole.output == "" && whole.errors.hasPrefix("tokenkeeperd: \(folder.path)/f: "))
            #expect(rehearsal.status == 70 && rehearsal.errors == whole.errors)
            return whole.errors
        }
        let utf32: [UInt8] = "token\n\(token)\n".utf8.flatMap { [$0, UInt8(0), UInt8(0), UInt8(0)] }
        let utf16: [UInt8] = "token\n\(token)\n".utf8.flatMap { [$0, UInt8(0)] }
        for (bytes, words) in [
            ([0x1F, 0x8B, 8, 0], "gunzip"), ([0x28, 0xB5, 0x2F, 0xFD], "unzstd"), (Array("PK\u{3}\u{4}".utf8), "zip"),
            ([0xFF, 0xFE] + utf16, "iconv -f UTF-16"), (utf16, "UTF-16"), ([0] + utf16.dropLast(), "UTF-16"),
            ([0xFF, 0xFE, 0, 0] + utf32, "iconv -f UTF-32"), (utf32, "UTF-32"),
            ([0, 0, 0] + utf32.dropLast(3), "UTF-32"),
            (Array("BZh91AY&SY".utf8), "bunzip2"), ([0xFD, 0x37, 0x7A, 0x58, 0x5A, 0], "unxz"),
            (Array("PAR1\u{15}\u{4}".utf8), "Parquet"),
        ] as [([UInt8], String)] {
            #expect(try refusal(bytes, usual).contains(words))
            #expect(try refusal(bytes, ["--format", "json", "--topic", "t"]).contains(words))
        }
        for empty in ["", "\n\n", "\u{FEFF}"] {
            #expect(try refusal(Array(empty.utf8), usual).contains("the file is empty, expected a header"))
        }
        let topic = try refusal(Array("token\n\(token)\n".utf8), ["--format", "csv"])
        #expect(topic.contains("no column has the topic: give --topic"))
        let numbered = try refusal(
            Array("\(token)\n".utf8), ["--format", "csv", "--no-header", "--column", "token=1"])
        #expect(numbered.contains("no column has the topic"))
        let noHeader = try refusal(Array("\(token),t\n\(token),t\n".utf8), usual)
        #expect(noHeader.contains("--no-header") && noHeader.contains("abababab"))
        #expect(!noHeader.contains("ababababab"), "no whole token is shown")
        let here = try folder.write("token\nzz\n", to: "g")
        let away = try run([here, "--rejects", "\(folder.path)/none/r"] + usual, on: database)
        #expect(away.status == 70 && away.errors.contains("cannot be written (No such file or directory)"))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration_source") == "0")
        // A file of JSON Lines or of feedback may have nothing to say.
        _ = try folder.write("", to: "f")
        let nothing = try run(["\(folder.path)/f", "--format", "json"], on: database)
        #expect(nothing.status == 0 && nothing.output == "\(folder.path)/f: 0 rows; queued 0, refused 0, skipped 0\n")
    }

    @Test func `what comes before the break of an array is queued, and never twice`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let elements = ["aa", "bb", "cc"].map { "{\"token\":\"\($0)\"}," }.joined()
        let file = try folder.write("[\(elements)", to: "f.json")
        let arguments = [file, "--format", "json", "--topic", "t"]
        let words =
            "\(file): after 3 elements, at byte \(elements.utf8.count + 1), counted from 0: the array is not closed"
        let rehearsal = try run(arguments + ["--dry-run"], on: database)
        #expect(rehearsal.status == 70 && rehearsal.output.contains("would queue 3"), "\(rehearsal.output)")
        #expect(rehearsal.errors.contains(words), "\(rehearsal.errors)")
        for _ in 1...2 {
            let broken = try run(arguments, on: database)
            #expect(broken.status == 70 && broken.errors.contains(words), "\(broken.errors)")
            #expect(broken.output.contains("3 rows; queued 3, refused 0") && broken.output.contains("to undo:"))
            let queued = "SELECT count(*), count(DISTINCT token) FROM tokenkeeper.registration"
            #expect(try database.psql(queued) == "3|3")
        }
        #expect(try database.psql("SELECT count(finished_at) FROM tokenkeeper.registration_source") == "0")
    }

    @Test func `an array continues where its import was killed`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let token = { (n: Int) in String(n + (1 << 30), radix: 16) }
        let text = "[\n" + (1...30_000).map { "{\"token\":\"\(token($0))\"}" }.joined(separator: ",\n") + "\n]\n"
        let file = try folder.write(text, to: "f.json")
        let arguments = [file, "--format", "json", "--topic", "t"]
        #expect(try run(arguments, on: database).status == 0)
        // As if it had been killed after its first batch.
        try database.psql(
            """
            DELETE FROM tokenkeeper.registration WHERE token > '\(token(20_000))';
            UPDATE tokenkeeper.registration_source SET finished_at = NULL, queued = 20000,
                position = regexp_replace(regexp_replace(regexp_replace(position, 'offset=[0-9]+', 'offset=\(2 + 20_000 * 22 - 2)'),
                    'lines=[0-9]+', 'lines=20000'), 'records=[0-9]+', 'records=20000')
            """)
        let rest = try run(arguments, on: database)
        #expect(rest.status == 0 && rest.errors.contains("continuing source 1 after 20000 elements"), "\(rest)")
        #expect(rest.output.contains("30000 rows; queued 30000, refused 0"), "\(rest.output)")
        #expect(
            try database.psql("SELECT count(*), count(DISTINCT token) FROM tokenkeeper.registration") == "30000|30000")
    }

    @Test func `a time zone is one that the server knows, and gives each time its offset`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write(
            "token,registered_at\naa,2024-01-01 12:00\nbb,2024-07-01 12:00\ncc,2024-07-01 12:00Z\ndd,\n", to: "f.csv")
        let zoned = try run(
            [file, "--time-zone", "europe/berlin", "--as-of", "2024-07-01 13:00"] + usual, on: database)
        #expect(zoned.status == 0, "\(zoned)")
        #expect(
            try database.psql(
                "SELECT token, registered_at AT TIME ZONE 'UTC' FROM tokenkeeper.registration ORDER BY token") == """
                    aa|2024-01-01 11:00:00
                    bb|2024-07-01 10:00:00
                    cc|2024-07-01 12:00:00
                    dd|2024-07-01 11:00:00
                    """)
        // Until 2011, the clocks of St. John's changed at one minute past midnight.
        let odd = try folder.write(
            "token,registered_at\naa,2010-03-14 00:00\nbb,2010-03-14 01:01\ncc,2010-03-14 01:15\n", to: "g.csv")
        #expect(try run([odd, "--time-zone", "America/St_Johns"] + usual, on: database).status == 0)
        #expect(
            try database.psql(
                "SELECT token, registered_at AT TIME ZONE 'UTC' FROM tokenkeeper.registration WHERE registered_at < '2011-01-01Z' ORDER BY token"
            ) == "aa|2010-03-14 03:30:00\nbb|2010-03-14 03:31:00\ncc|2010-03-14 03:45:00")
        // PostgreSQL takes UTC+9 for a zone west of Greenwich.
        for name in ["Nowhere", "UTC+9"] {
            let wrong = try run([file, "--dry-run", "--time-zone", name] + usual, on: database)
            #expect(wrong.status == 70 && wrong.errors.contains("is no time zone"), "\(wrong)")
        }
        let late = try run(
            [file, "--dry-run", "--time-zone", "Asia/Tokyo", "--as-of", "2999-01-01"] + usual, on: database)
        #expect(late.status == 70 && late.errors.contains("in the future"), "\(late)")
    }

    @Test(arguments: [("LATIN1", 2), ("SQL_ASCII", 0), ("EUC_JP", 1)])
    func `a character that the database cannot hold costs its own row`(encoding: String, refused: Int) throws {
        let name = "e_\(encoding.lowercased())_\(UInt32.random(in: 0...UInt32.max))"
        try TestCluster.shared.database(migrated: false).psql(
            "CREATE DATABASE \(name) OWNER owner ENCODING '\(encoding)' LOCALE 'C' TEMPLATE template0", user: "postgres"
        )
        let database = TestDatabase(cluster: TestCluster.shared, name: name)
        var owner = try database.connect()
        try Migrator(daemon: Version(major: 0, minor: 1, patch: 0)).migrate(&owner, createsRoles: true) { _ in }
        let folder = try TemporaryDirectory()
        let file = try folder.write("token,user_id,tags\naa,Вера,\nbb,,\ncc,x,\"a,😀\"\nßß,,\n", to: "f.csv")
        let told = try run([file] + usual, on: database)
        #expect(told.status == 1, "\(told)")
        #expect(told.output.contains("queued \(3 - refused), refused \(1 + refused)"), "\(encoding): \(told)")
        if refused == 2 {
            #expect(told.output.contains("refused 2: the database cannot hold a character"), "\(told)")
            let rejects = try String(contentsOfFile: file + ".rejected", encoding: .utf8)
            #expect(rejects.contains("line 2: the database cannot hold a character: U+412\",aa,Вера,"), "\(rejects)")
        }
        #expect(try run([file, "--dry-run"] + usual, on: database).output.contains("refuse \(1 + refused)"))
    }

    @Test func `rows of another platform are named, and no row that passes is a warning`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write(
            "token,platform\n\(String(repeating: "ab", count: 32)),ios\nx:APA91\(String(repeating: "y", count: 140)),android\n",
            to: "f.csv")
        let all = try run([file, "--dry-run"] + usual, on: database)
        #expect(all.output.contains("refused 1: the token is no token: a token of Firebase"), "\(all)")
        #expect(all.output.contains("tokens of 64 hex digits: 1\n  refused"), "only what can be queued: \(all)")
        #expect(all.output.contains("leave them out with --filter COLUMN=VALUE"), "\(all)")
        let ours = try run([file, "--dry-run", "--filter", "platform=ios"] + usual, on: database)
        #expect(ours.status == 0 && ours.output.contains("would queue 1, refuse 0, skip 1"), "\(ours)")
        #expect(ours.output.contains("skipped 1: platform is \"android\""), "\(ours)")
        let none = try run([file, "--filter", "platform=IOS"] + usual, on: database)
        #expect(none.status == 0 && none.output.contains("warning: no row passes --filter"), "\(none)")
    }

    @Test func `an import that was begun anew and has finished is not continued from before`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\n", to: "f.csv")
        for _ in 0..<2 { #expect(try run([file, "--restart"] + usual, on: database).status == 0) }
        try database.psql("UPDATE tokenkeeper.registration_source SET finished_at = NULL WHERE source_id = 1")
        let third = try run([file] + usual, on: database)
        #expect(third.status == 0 && third.errors == "", "\(third.errors)")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration_source") == "3")
    }

    @Test func `a full disk interrupts an import, which continues once there is room`() throws {
        let database = try TestCluster.shared.database()
        let folder = try TemporaryDirectory()
        let file = try folder.write("token\naa\nzz\n", to: "f.csv")
        // No file may grow beyond 0 bytes: the same path in the command as a disk without room.
        let full = try ProgramRun(
            [
                "bash", "-c", "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"", DaemonProcess.program, "import", file,
            ] + usual, environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")])
        #expect(
            full.status == 70 && full.errors.contains("f.csv.rejected, the file for refused rows, cannot be written"))
        #expect(full.errors.contains("run the same command again to continue source 1"), "\(full.errors)")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0")
        let rest = try run([file] + usual, on: database)
        #expect(rest.status == 1 && rest.output.contains("queued 1, refused 1"), "\(rest.output)\(rest.errors)")
        #expect(try database.psql("SELECT token, source_id FROM tokenkeeper.registration") == "aa|1")
    }
}
