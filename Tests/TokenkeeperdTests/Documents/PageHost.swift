import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun

/// A machine as the commands of a page see it: PostgreSQL with the database `push`, a daemon that sends to a fake APNs, `sudo`, and the
/// folders of the package. What belongs to other programs (`apt`, `systemctl`, `podman`, …) does nothing.
///
/// What a page prints runs unchanged, but for the places of files and servers, which are ours:
///
/// - `/etc`, `/run` and `/usr/share/doc/tokenkeeperd` are in a folder of the test, and the host `db.internal` is this one;
/// - `'a1b2…'` is the token `a1b2`.
final class PageHost {
    let database: TestDatabase
    private let cluster: TestCluster
    private let apns: FakeAPNs
    private let files: TestAuthority
    let folder: TemporaryDirectory
    private let daemon: DaemonProcess

    /// One cluster for all pages, which follow each other: a page's database is made for it.
    private static let prepared: Result<TestCluster, any Error> = Result {
        let cluster = try TestCluster.prepared()
        let admin = TestDatabase(cluster: cluster, name: "postgres")
        for statement in [
            "ALTER ROLE owner RENAME TO tokenkeeper_owner", "CREATE ROLE administrator LOGIN SUPERUSER",
            "CREATE ROLE pages LOGIN IN ROLE tokenkeeper_app, tokenkeeper_sender, tokenkeeper_reader, tokenkeeper_operator, pg_monitor, pg_signal_backend",
        ] { try admin.psql(statement, user: "postgres") }
        return cluster
    }

    /// - Parameter situation: SQL that makes what the page assumes. The role is `pages` unless the SQL sets another one.
    init(situation: String, user: String) throws {
        cluster = try Self.prepared.get()
        let admin = TestDatabase(cluster: cluster, name: "postgres")
        for name in ["push", "mydb"] {
            try admin.psql("DROP DATABASE IF EXISTS \(name) WITH (FORCE)", user: "postgres")
        }
        try admin.psql("DROP ROLE IF EXISTS app_owner, tokens, tokenkeeperd", user: "postgres")
        try admin.psql("CREATE DATABASE push OWNER tokenkeeper_owner TEMPLATE template", user: "postgres")
        try admin.psql("CREATE DATABASE mydb", user: "postgres")
        database = TestDatabase(cluster: cluster, name: "push")
        try database.psql("GRANT CREATE ON SCHEMA public TO pages", user: "postgres")
        files = try SendingStage.authority.get()
        apns = try FakeAPNs.start(FakeOptions(files)) { _ in nil }
        folder = try TemporaryDirectory()
        self.user = user
        let manager = FileManager.default
        for name in [
            "bin", "home", "etc/tokenkeeperd/conf.d", "etc/tokenkeeperd/credentials", "etc/tokenkeeperd/apns", "run",
            "etc/prometheus",
        ] {
            try manager.createDirectory(atPath: "\(folder.path)/\(name)", withIntermediateDirectories: true)
        }
        try """
        [drain]
        poll_idle = "100ms"
        [send]
        production_server = "localhost:\(apns.port)"
        sandbox_server = "localhost:\(apns.port)"
        ca_file = "\(files.certificate)"
        [credential.main]
        key_file = "\(files.signingKeyFile)"
        key_id = "\(files.signingKey.id)"
        team_id = "\(files.signingKey.team)"
        topics = ["com.example.*"]

        """.write(toFile: folder.path + "/etc/tokenkeeperd/tokenkeeperd.toml", atomically: true, encoding: .utf8)
        try database.psql("SET client_min_messages = warning; SET ROLE pages; " + situation, user: "postgres")
        daemon = try DaemonProcess(database.url(), arguments: ["--config", folder.path + "/etc/tokenkeeperd"])
        try install()
    }

    private let user: String

    private func install() throws {
        var programs = [
            // root is the user of the service for us, and postgres the administrator.
            "sudo": """
            export PGUSER=a_daemon
            while [[ $1 == -* ]]; do case $1 in -u) export PGUSER=$2; shift 2 ;; *) shift ;; esac; done
            exec "$@"
            """,
            // The daemon of a page runs until it says that it has started.
            "tokenkeeperd": """
            # The doctor may find something in the cluster of a test.
            if [ "${1:-}" = doctor ]; then '\(DaemonProcess.program)' "$@" || [ $? = 1 ]; exit; fi
            [ "${1:-}" = run ] || exec '\(DaemonProcess.program)' "$@"
            unset TOKENKEEPER_CONFIG TOKENKEEPER_DATABASE_URL
            '\(DaemonProcess.program)' "$@" 2>"$HOME/log" &
            until grep -q msg=started "$HOME/log"; do
                kill -0 $! 2>/dev/null || { cat "$HOME/log" >&2; exit 1; }
                sleep 0.02
            done
            kill $! && wait $!
            """,
            // There is no user of the service.
            "install": """
            arguments=()
            while [ $# -gt 0 ]; do if [ "$1" = -o ]; then shift; else arguments+=("$1"); fi; shift; done
            exec /usr/bin/install "${arguments[@]}"
            """,
            "systemd-ask-password": "echo secret",
            "curl": "echo sql_tokenkeeper",
        ]
        for name in [
            "apt", "apt-get", "journalctl", "kubectl", "make", "podman", "promtool", "ssh", "swift", "systemctl",
            "systemd-tmpfiles", "useradd",
        ] { programs[name] = "exit 0" }
        for (name, text) in programs {
            let path = "\(folder.path)/bin/\(name)"
            try "#!/bin/bash\n\(text)\n".write(toFile: path, atomically: true, encoding: .utf8)
            try FileManager.default.setAttributes([.posixPermissions: 0o755], ofItemAtPath: path)
        }
    }

    /// Runs a block of shell commands, or of SQL, and returns what it prints. The variables of one block are there in the next.
    ///
    /// - Throws: `TestFailure` if a command fails, also in the middle.
    @discardableResult
    func run(_ block: PrintedBlock) throws -> String {
        let text = block.text.replacing(#/'([0-9A-Fa-f]{4})…'/#) { "'\($0.output.1)'" }
            .replacing(#/{([0-9A-Fa-f]{4})…}/#) { "{\($0.output.1)}" }
        let path = ProcessInfo.processInfo.environment["PATH"] ?? ""
        let environment = [
            "PATH": "\(folder.path)/bin:\(path)", "HOME": folder.path + "/home", "USER": "root",
            "PGHOST": cluster.folder, "PGPORT": "\(cluster.port)", "PGUSER": user, "PGDATABASE": "push",
            "TOKENKEEPER_DATABASE_URL": "postgresql:///push",
            "TOKENKEEPER_CONFIG": folder.path + "/etc/tokenkeeperd",
        ]
        let run =
            if block.language == "sql" {
                // Roles, databases and publications are an administrator's.
                try ProgramRun(
                    [
                        "timeout", "120", "bash", "-c",
                        "cd \"$HOME\"; exec psql -XAtq -v ON_ERROR_STOP=1 ${0:+-U $0}",
                        text.contains(#/(?m)^(CREATE (ROLE|DATABASE|PUBLICATION)|GRANT) /#) ? "postgres" : "",
                    ], input: text + "\n", environment: environment)
            } else {
                try ProgramRun(
                    [
                        "timeout", "120", "bash", "-eu", "-c",
                        "cd \"$HOME\"; set -a; [ ! -e variables ] || . ./variables\n\(ours(text))\nset +a; export -p >variables",
                    ], environment: environment)
            }
        guard run.status == 0 else {
            throw TestFailure("exit \(run.status): \(run.output)\(run.errors)")
        }
        return run.output.trimmingCharacters(in: .newlines)
    }

    private func ours(_ text: String) -> String {
        text.replacing("/run/postgresql", with: cluster.folder)
            .replacing("@db.internal/", with: "@/")
            .replacing(#/(\s|=)/(etc|run)//#) { "\($0.output.1)\(folder.path)/\($0.output.2)/" }
            .replacing("/usr/share/doc/tokenkeeperd", with: PackagedProgram.repository.path)
    }

    /// Ends the daemon and the fake APNs.
    func end() -> Int32 {
        defer { apns.stop() }
        return daemon.stop()
    }
}
