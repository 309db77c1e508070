import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@Suite(.ownThread) struct `Import of each format` {
    static let folder = URL(filePath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
        .deletingLastPathComponent().appending(path: "Fixtures/Import").path

    /// What a script of `clients/convert` writes, in a folder of its own.
    private static func convert(_ script: String, _ arguments: [String], to name: String) throws -> String {
        let folder = NSTemporaryDirectory() + "import-\(UUID().uuidString)"
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        let path = PackagedProgram.repository.appendingPathComponent("clients/convert/\(script)").path
        let run = try ProgramRun(["python3", path] + arguments)
        #expect(run.status == 0, "\(run.errors)")
        try run.output.write(toFile: "\(folder)/\(name)", atomically: true, encoding: .utf8)
        return "\(folder)/\(name)"
    }

    /// A fixture in a folder of its own: the refused rows are written next to it.
    private static func copy(_ name: String) throws -> String {
        let folder = NSTemporaryDirectory() + "import-\(UUID().uuidString)"
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        try FileManager.default.copyItem(atPath: "\(Self.folder)/\(name)", toPath: "\(folder)/\(name)")
        return "\(folder)/\(name)"
    }

    private static let columns = """
        environment, topic, right(token, 2), to_char(registered_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'), device_id, user_id, tags::text, unregistered
        """

    private func registrations(_ name: String, _ arguments: [String]) throws -> (
        rows: [String], run: ProgramRun, rejects: String
    ) {
        try registrations(of: Self.copy(name), arguments)
    }

    private func registrations(of file: String, _ arguments: [String]) throws -> (
        rows: [String], run: ProgramRun, rejects: String
    ) {
        let database = try TestCluster.shared.database()
        defer { try? FileManager.default.removeItem(atPath: (file as NSString).deletingLastPathComponent) }
        let run = try ProgramRun(
            [DaemonProcess.program, "import", file, "--as-of", "2025-06-01"] + arguments,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")])
        let rows = try database.psql(
            "SELECT concat_ws('|', \(Self.columns)) FROM tokenkeeper.registration ORDER BY token")
        let rejects = (try? String(contentsOfFile: file + ".rejected", encoding: .utf8)) ?? ""
        return (rows.split(separator: "\n").map(String.init), run, rejects)
    }

    private func results(of file: String, _ arguments: [String]) throws -> (rows: String, run: ProgramRun) {
        let database = try TestCluster.shared.database()
        defer { try? FileManager.default.removeItem(atPath: (file as NSString).deletingLastPathComponent) }
        let run = try ProgramRun(
            [DaemonProcess.program, "import", file] + arguments,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "owner")])
        let rows = try database.psql(
            """
            SELECT concat_ws('|', environment, topic, right(token, 2), status, body,
                to_char(sent_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'))
            FROM tokenkeeper.send_result ORDER BY token
            """)
        return (rows, run)
    }

    @Test func `CSV`() throws {
        let (rows, run, rejects) = try registrations(
            "devices.csv",
            [
                "--format", "csv", "--column", "token=push_token", "--column", "topic=bundle", "--column",
                "environment=env", "--column", "registered_at=last_seen", "--column", "device_id=device", "--column",
                "user_id=account", "--column", "tags=labels", "--column", "unregistered=logged_out",
                "--environment-value", "development=sandbox", "--null", "(null)",
            ])
        #expect(run.status == 1 && run.errors == "", "\(run.errors)")
        #expect(
            rows == [
                "production|com.example.app|ad|2025-03-01 08:00:00.000000|d1|u1|{news,\"late night\"}|f",
                "production|com.example.app|ae|2025-03-02 06:00:00.123456|d2|f",
                "sandbox|com.example.app|af|2025-03-03 08:00:00.000000|u3|f",
                "production|com.example.app|b0|2025-03-04 08:00:00.000000|d4|u4|{}|t",
            ])
        #expect(rejects.contains("\n\"tokenkeeperd: line 6: the token is empty\",5,(null),"), "\(rejects)")
        #expect(run.output.contains("5 rows; queued 4, refused 1, skipped 0"), "\(run.output)")
        #expect(run.output.contains("to undo: tokenkeeperd withdraw 1\n"), "\(run.output)")
    }

    @Test func `JSON Lines`() throws {
        let (rows, run, rejects) = try registrations(
            "devices.jsonl",
            [
                "--format", "json", "--column", "token=pushToken", "--column", "registered_at=lastSeen", "--column",
                "user_id=user", "--topic", "com.example.app",
            ])
        #expect(
            rows == [
                "production|com.example.app|ad|2025-03-01 08:00:00.000000|{news,sports}|f",
                "production|com.example.app|ae|2025-03-02 08:00:00.000000|42|f",
                "production|com.example.app|af|2025-06-01 00:00:00.000000|f",
            ], "\(run.errors)")
        #expect(rejects.hasPrefix("{\"tokenkeeperd\":\"line 3: token is 'Exponent'"), "\(rejects)")
        #expect(run.output.contains("  refused 1: the token is no token: a token of Expo\n"), "\(run.output)")
    }

    @Test func `Azure's registrations`() throws {
        let file = try Self.convert(
            "notification_hubs.py", ["registrations", "\(Self.folder)/azure-registrations.txt"], to: "f.csv")
        let (rows, run, rejects) = try registrations(of: file, ["--format", "csv", "--topic", "com.example.app"])
        #expect(
            rows == [
                "production|com.example.app|AD|2025-06-01 00:00:00.000000|u&1|{news,sports:football}|f",
                "production|com.example.app|AE|2025-06-01 00:00:00.000000|8a9c1ae2-0f63-4b2c-8a2d-000000000001|f",
            ], "\(run.errors)")
        #expect(rejects.contains("line 4: token is '740F4707'"), "\(rejects)")
    }

    @Test func `Synapse's pushers`() throws {
        let (rows, run, _) = try registrations(
            "synapse-pushers.csv",
            [
                "--format", "csv", "--column", "token=pushkey", "--column", "topic=app_id", "--column",
                "registered_at=ts", "--column", "user_id=user_name", "--column", "active=enabled", "--column",
                "device_id=", "--token-form", "base64", "--filter", "app_id=org.example.ios.prod", "--filter",
                "app_id=org.example.ios.dev", "--topic-value", "org.example.ios.prod=com.example.app",
                "--topic-value", "org.example.ios.dev=com.example.app:sandbox",
            ])
        #expect(run.status == 0, "\(run.output)\(run.errors)")
        #expect(
            rows == [
                "production|com.example.app|ad|2025-03-01 08:00:00.000000|@alice:example.org|f",
                "production|com.example.app|ae|2025-03-02 08:00:00.000000|@bob:example.org|f",
                "sandbox|com.example.app|af|2025-03-02 08:00:00.000000|@bob:example.org|f",
                "production|com.example.app|b0|2025-03-02 08:00:00.000000|@erin:example.org|t",
            ])
        for app in ["m.email", "org.example.android"] {
            #expect(run.output.contains("  skipped 1: app_id is \"\(app)\"\n"), "\(run.output)")
        }
    }

    @Test func `Apple's feedback`() throws {
        let file = try Self.convert("apple_feedback.py", ["\(Self.folder)/apple-feedback.bin"], to: "f.csv")
        let (rows, run) = try results(of: file, ["--format", "csv", "--feedback", "--topic", "com.example.app"])
        #expect(
            rows == """
                production|com.example.app|ad|410|{"reason":"Unregistered","timestamp":1500000000000}|2017-07-14 02:40:00.000000
                production|com.example.app|ae|410|{"reason":"Unregistered","timestamp":1600000000000}|2020-09-13 12:26:40.000000
                """)
        #expect(run.status == 0 && run.output.contains("2 rows; queued 2, refused 0"), "\(run.output)\(run.errors)")
    }

    @Test func `Azure's PnsFeedback`() throws {
        let file = try Self.convert(
            "notification_hubs.py", ["feedback", "\(Self.folder)/pns-feedback.xml"], to: "f.csv")
        let (rows, run) = try results(
            of: file, ["--format", "csv", "--feedback", "--topic", "com.example.app", "--environment", "sandbox"])
        #expect(
            rows == """
                sandbox|com.example.app|AD|410|{"reason":"Unregistered","timestamp":1717184772477}|2024-05-31 19:46:12.477054
                sandbox|com.example.app|AE|400|{"reason":"BadDeviceToken"}|2024-05-31 19:46:13.000000
                """)
        #expect(run.status == 0 && run.output.contains("2 rows; queued 2, refused 0"), "\(run.output)\(run.errors)")
    }
}
