import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import Testing

/// A machine with PostgreSQL, tokenkeeperd and a Django project, as the commands of a page see it: `sudo`, `psql`, `tokenkeeperd`,
/// `systemctl` and `python` do what they do on a real one, in this cluster and these folders.
final class DjangoHost {
    let cluster: TestCluster
    let database: TestDatabase
    let apns: FakeAPNs
    private let files: TestAuthority
    private let folder: TemporaryDirectory
    private(set) var daemon: DaemonProcess

    private static let repository = PackagedProgram.repository.path
    private var project: String { folder.path + "/shop" }
    private var configuration: String { folder.path + "/tokenkeeperd" }

    /// The settings of the service, for what a test cannot wait for.
    private static let settings = """
        [drain]
        poll_idle = "100ms"
        [guard]
        max_share = "100%"

        """

    init(answer: @escaping FakeAPNs.Answer) throws {
        cluster = try TestCluster.prepared()
        var admin = try cluster.connect(database: "postgres")
        try admin.run("CREATE DATABASE push OWNER owner TEMPLATE template")
        try admin.run("CREATE ROLE django LOGIN")
        database = TestDatabase(cluster: cluster, name: "push")
        try database.psql("GRANT CREATE ON SCHEMA public TO django", user: "postgres")
        files = try SendingStage.authority.get()
        apns = try FakeAPNs.start(FakeOptions(files), answer: answer)
        folder = try TemporaryDirectory()
        let manager = FileManager.default
        for name in ["bin", "tokenkeeperd/conf.d"] {
            try manager.createDirectory(atPath: "\(folder.path)/\(name)", withIntermediateDirectories: true)
        }
        try manager.copyItem(atPath: "\(Self.repository)/Tests/clients/shop", toPath: folder.path + "/shop")
        try Self.settings.write(
            toFile: folder.path + "/tokenkeeperd/tokenkeeperd.toml", atomically: true, encoding: .utf8)
        daemon = try DaemonProcess(database.url(), arguments: ["--config", folder.path + "/tokenkeeperd"])
        try install()
    }

    private func install() throws {
        for (name, text) in [
            // root is the service's user for us, and postgres the administrator.
            "sudo": """
            user=a_daemon
            while [[ $1 == -* ]]; do case $1 in -u) user=$2; shift 2 ;; *) shift ;; esac; done
            PGUSER=$user exec "$@"
            """,
            "tokenkeeperd": """
            if [ "$PGUSER" = a_daemon ]; then export TOKENKEEPER_DATABASE_URL=postgresql:///push; fi
            exec '\(DaemonProcess.program)' "$@"
            """,
            "systemctl": """
            [ "$*" = 'reload tokenkeeperd' ] && exec kill -HUP \(daemon.pid)
            echo "unknown: systemctl $*" >&2; exit 1
            """,
        ] {
            let path = "\(folder.path)/bin/\(name)"
            try "#!/bin/bash\n\(text)\n".write(toFile: path, atomically: true, encoding: .utf8)
            try FileManager.default.setAttributes([.posixPermissions: 0o755], ofItemAtPath: path)
        }
    }

    /// Runs a command in the folder of the project, and returns its output.
    @discardableResult
    func run(_ command: String) throws -> String {
        let clock = ContinuousClock()
        let started = clock.now
        let run = try ProgramRun(
            [
                "timeout", "300", "bash", "-ceu",
                "cd '\(project)'; " + command.replacing("/etc/tokenkeeperd", with: configuration),
            ],
            environment: [
                "PATH":
                    "\(folder.path)/bin:\(Self.repository)/.build/python/bin:\(ProcessInfo.processInfo.environment["PATH"] ?? "")",
                "PGHOST": cluster.folder, "PGPORT": "\(cluster.port)", "PGUSER": "nobody",
                "PYTHONPATH": "\(Self.repository)/Tests/clients:.", "PYTHONDONTWRITEBYTECODE": "1",
                "DJANGO_SETTINGS_MODULE": "settings",
                "APNS_PORT": "\(apns.port)", "APNS_CA": files.certificate, "APNS_KEY": files.signingKeyFile,
                "APNS_KEY_ID": files.signingKey.id, "APNS_TEAM_ID": files.signingKey.team,
                "PROVIDER_URL": "", "OWNER_URL": "",
            ])
        if Soak.isWhole { print(clock.now - started, command.prefix(90), run.errors.suffix(500)) }
        guard run.status == 0 else {
            throw TestFailure("\(command): exit \(run.status): \(run.output)\(run.errors)\(daemon.logged.suffix(2000))")
        }
        return run.output
    }

    /// Appends to the project's settings.
    func addSettings(_ text: String) throws {
        let file = project + "/settings.py"
        let settings = try String(contentsOfFile: file, encoding: .utf8)
        try (settings + "\n" + text).write(toFile: file, atomically: true, encoding: .utf8)
    }

    /// The commands of a page: each block of shell commands, line by line; a command may continue after a backslash or up to the end of a
    /// here-document.
    static func commands(of page: String) throws -> [String] {
        var commands: [String] = []
        var isInside = false
        var end: Substring?
        for line in page.split(separator: "\n", omittingEmptySubsequences: false) {
            let text = line.drop { $0 == " " }
            if text.hasPrefix("```") {
                isInside = text == "```sh"
            } else if isInside, !text.isEmpty, !text.hasPrefix("#") {
                if end != nil || commands.last?.hasSuffix("\\") == true {
                    commands[commands.count - 1] += "\n" + text
                    if text == end { end = nil }
                } else {
                    commands.append(String(text))
                    end = text.firstMatch(of: #/<<'([A-Z]+)'/#)?.output.1
                }
            }
        }
        return commands
    }
}
