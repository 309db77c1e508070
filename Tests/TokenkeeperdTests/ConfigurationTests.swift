import APNsFeedback
import ArgumentParser
import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenLedger

@testable import tokenkeeperd

private func named(_ name: String, _ text: String) -> ConfigurationText {
    ConfigurationText(contents: Array(text.utf8), name: name)
}

private func load(
    _ text: String? = nil, environment: [String: String] = [:], flags: [String] = []
) throws -> Configuration {
    try Configuration(files: text.map { [named("t.toml", $0)] } ?? [], environment: environment, flags: flags)
}

private func problems(_ text: String? = nil, environment: [String: String] = [:], flags: [String] = []) -> [String] {
    do {
        _ = try load(text, environment: environment, flags: flags)
        return []
    } catch {
        return (error as? ConfigurationError)?.problems ?? ["\(error)"]
    }
}

@Suite(.ownThread) struct `The configuration` {
    @Test func `without any input the defaults are in force, and every default is valid`() throws {
        let configuration = try load()
        #expect(configuration.sweepInterval == .seconds(3600))
        #expect(configuration.sweepPlan.suppressedRetention == .seconds(90 * 86400))
        #expect(configuration.sweepPlan.dormantAfter == nil)
        #expect(configuration.pollBusy == .milliseconds(20) && configuration.pollIdle == .seconds(1))
        for setting in Setting.table {
            if let defaultValue = setting.defaultValue { #expect(setting.accepts(defaultValue), "\(setting.key)") }
        }
    }

    @Test func `flags override the environment, the file and the defaults, in this order`() throws {
        let file = "[sweep]\ninterval = \"2h\"\nbatch = 7\nsuppressed_retention = \"30d\"\n"
        let configuration = try load(
            file, environment: ["TOKENKEEPER_SWEEP_INTERVAL": "3h", "TOKENKEEPER_SWEEP_BATCH": "8", "HOME": "/"],
            flags: ["sweep.interval=4h"])
        #expect(configuration.sweepInterval == .seconds(4 * 3600))
        #expect(configuration.sweepPlan.batch == 8)
        #expect(configuration.sweepPlan.suppressedRetention == .seconds(30 * 86400))
        #expect(configuration.values["sweep.suppressed_retention"]?.origin == "t.toml:4")
    }

    @Test func `a later file overrides an earlier one key by key, and each problem names its file`() throws {
        let configuration = try Configuration(
            files: [
                named("a.toml", "[sweep]\ninterval = \"2h\"\nbatch = 7\n[credential.main]\nkey_file = \"a.p8\"\n"),
                named("b.toml", "[sweep]\ninterval = \"3h\"\n"),
                named(
                    "c.toml",
                    "[credential.main]\nkey_id = \"ABC1234567\"\nteam_id = \"TEAM123456\"\ntopics = [\"t\"]\n"),
            ], environment: [:], flags: [])
        #expect(configuration.sweepInterval == .seconds(3 * 3600))
        #expect(configuration.values["sweep.interval"]?.origin == "b.toml:2")
        #expect(configuration.values["sweep.batch"]?.origin == "a.toml:3")
        #expect(configuration.credentials.map(\.keyFile) == ["a.p8"], "a section may be in several files")
        #expect(throws: ConfigurationError(["a.toml:1: unknown setting x", "b.toml:1: unknown setting y"])) {
            try Configuration(
                files: [named("a.toml", "x = 1\n"), named("b.toml", "y = 1\n")], environment: [:], flags: [])
        }
    }

    @Test func `an unknown key is refused with its line`() {
        #expect(
            problems("[sweep]\n\n# a comment\nintervall = \"2h\"\n") == ["t.toml:4: unknown setting sweep.intervall"])
        #expect(problems("interval = \"2h\"\n") == ["t.toml:1: unknown setting interval; is sweep.interval meant?"])
        #expect(
            problems("[swep]\ninterval = \"2h\"\n").first?.hasPrefix("t.toml:2: unknown setting swep.interval") == true)
        #expect(problems("[nothing]\n") == ["t.toml:1: unknown setting nothing"])
        #expect(problems("[sweep]\r\n\r\nfoo = 1\r\n") == ["t.toml:3: unknown setting sweep.foo"])
        #expect(problems("[credential.main]\n") == ["t.toml:1: unknown setting credential.main"], "nothing is in it")
        #expect(
            problems("\n\"sweep.batch\" = 7\n\"postgresql://u:hunter2@h\" = 1\n") == [
                "t.toml:2: expected the key of a setting, found one with other characters",
                "t.toml:3: expected the key of a setting, found one with other characters",
            ])
        #expect(problems("[drain]\n# poll_idle = \"1s\"\n[sweep]\n") == [], "everything is commented out")
    }

    @Test func `a wrong type or value is refused with its line, what was found and what was expected`() {
        #expect(
            problems("[sweep]\nbatch = \"many\"\ninterval = 3600\n[drain]\npoll_idle = \"1 s\"\n") == [
                "t.toml:2: sweep.batch is \"many\", expected a whole number from 1 to 10000",
                "t.toml:3: sweep.interval is 3600, expected a duration such as \"90s\" or \"30d\", from 1m to 30d, or \"off\"",
                "t.toml:5: drain.poll_idle is \"1 s\", expected a duration such as \"90s\" or \"30d\", from 50ms to 1m",
            ])
        #expect(problems("[sweep]\nbatch = \"7\"\n").count == 1, "a number in quotes is a text")
        for value in ["true", "[1]", "1.5", "2020-01-01", "{ a = 1 }"] {
            #expect(!problems("[sweep]\nbatch = \(value)\n").isEmpty, "\(value)")
        }
    }

    @Test func `invalid TOML is refused with line and column`() {
        let found = problems("[sweep]\ninterval = \"2h\nbatch = 1\n")
        #expect(found.count == 1 && found[0].hasPrefix("t.toml:2:"), "\(found)")
    }

    @Test(arguments: [
        ("sweep.interval", "59s"), ("sweep.interval", "31d"), ("sweep.batch", "0"), ("sweep.batch", "10001"),
        ("log.level", "loud"),
        ("drain.lock_timeout", "off"), ("sweep.dormant_after", ""), ("drain.poll_busy", "0ms"),
        ("sweep.suppressed_retention", "99999999999999999999d"),
    ])
    func `a value outside its range is refused`(key: String, value: String) {
        #expect(
            problems(flags: ["\(key)=\(value)"]).first?.hasPrefix("command line: \(key) is \"\(value)\", expected")
                == true)
    }

    @Test func `all problems are reported at once`() {
        #expect(problems("a = 1\nb = 2\n", environment: ["TOKENKEEPER_C": "3"], flags: ["d", "e=5"]).count == 5)
    }

    @Test func `only the first twenty problems are reported, with shortened keys and values`() {
        func isShort(_ problems: [String]) -> Bool { problems.allSatisfy { $0.utf8.count < 300 } }
        let long = String(repeating: "a", count: 90)
        let sections = (1...400).map { "[\(long)\($0).\(long).\(long).\(long)]\n\(long) = 1\n" }.joined()
        let unknown = problems(sections)
        #expect(unknown.count == 21 && unknown.last == "and 380 more" && isShort(unknown), "\(unknown)")
        #expect(unknown.first == "t.toml:2: unknown setting \(long.prefix(60))...")
        let two = problems("[\"\(String(repeating: long, count: 400))\"]\n" + (1...2000).map { "k\($0)=1\n" }.joined())
        #expect(two.count == 1 && isShort(two), "\(two)")

        let value = String(repeating: "\u{1F1E9}", count: 4000)
        let texts = "[" + String(repeating: "\"\(long)\", ", count: 5000) + "]"
        let wrong = problems(
            "log.level = \"\(value)\"\nsweep.batch = \(texts)\nsend.production_server = \"\(value)\"",
            environment: ["TOKENKEEPER_\(long)": "1"], flags: ["\(long)=1", "sweep.interval=\(long)"])
        #expect(wrong.count == 6 && wrong.allSatisfy { $0.unicodeScalars.count < 600 }, "\(wrong)")
        #expect(wrong.last?.hasPrefix("command line: sweep.interval is \"\(long.prefix(60))\"..., expected") == true)

        let topics = "topics = [" + (1...20_000).map { "\"com.example.app\($0)\", " }.joined() + "]\n"
        let credential = "certificate_file = \"a\"\n" + topics
        let shared = problems("[credential.a]\n\(credential)[credential.b]\n\(credential)")
        #expect(shared.count == 21 && shared.last == "and 19980 more" && isShort(shared), "\(shared)")
        #expect(
            shared.first
                == "credential.b: topics has com.example.app1, and so does credential.a: keep one, or set environment in both"
        )
    }

    @Test func `a variable that names no setting is refused, and other programs' variables are ignored`() {
        #expect(
            problems(environment: ["TOKENKEEPER_SWEEP_INTERVALL": "1h"]) == [
                "environment variable TOKENKEEPER_SWEEP_INTERVALL: no setting has that name"
            ])
        #expect(problems(environment: ["TOKENKEEPER_CONFIG": "x", "TOKENKEEPERS": "y"]) == [])
        #expect(
            problems(environment: ["TOKENKEEPER_PORT": "tcp://10.0.0.1:80", "TOKENKEEPER_SERVICE_HOST": "10.0.0.1"])
                == [])
    }

    @Test func `the value of a secret is never shown`() {
        for wrong in ["postgresql://u:hunter2@[host/db", "password=hunter2 nonsense", "hunter2"] {
            let found = problems(environment: ["TOKENKEEPER_DATABASE_URL": wrong])
            #expect(!found.isEmpty && !found.joined().contains("hunter2"), "\(found)")
        }
        for flag in ["postgresql://u:hunter2@h/db", "postgresql://u:hunter2@h/db?a=b"] {
            let found = problems(flags: [flag])
            #expect(!found.isEmpty && !found.joined().contains("hunter2"), "\(found)")
        }
        for wrong in [
            "postgresql://u:hunter2@h/db", "host=h password=hunter2", "host=h PassWord \t= 'hunter2'",
            "sslpassword =hunter2",
        ] {
            for key in [
                "log.level", "sweep.batch", "database_password_file", "credential.a.topics", "credential.a.key_file",
            ] {
                for found in [
                    problems("\(key) = \"\(wrong)\""), problems("\(key) = [\"\(wrong)\"]"),
                    problems(flags: ["\(key)=\(wrong)"]),
                ] {
                    #expect(found.joined().contains("\(key) looks like a database address"), "\(found)")
                    #expect(!found.joined().contains("hunter2"), "\(found)")
                }
            }
        }
        let typed = problems("database_url = [\"hunter2\"]\n")
        #expect(!typed.isEmpty && !typed.joined().contains("hunter2"), "\(typed)")
    }

    @Test func `a reload applies what it can, and names what needs a restart until the restart`() throws {
        let before = try load("database_url = \"host=a\"\n[sweep]\ninterval = \"1h\"\n")
        let after = try load("database_url = \"host=b password=hunter2\"\n[sweep]\ninterval = \"2h\"\nbatch = 7\n")
        let live = LiveConfiguration(before)
        #expect(
            live.take(after)
                == .init(
                    taken: ["sweep.interval: 1h -> 2h", "sweep.batch: 4000 -> 7"], waiting: ["database_url"]))
        #expect(live.current.sweepInterval == .seconds(7200) && live.current.sweepPlan.batch == 7)
        #expect(live.current.address == before.address)
        #expect(live.take(after) == .init(taken: [], waiting: ["database_url"]))
        #expect(
            live.take(before)
                == .init(taken: ["sweep.interval: 2h -> 1h", "sweep.batch: 7 -> 4000"], waiting: []))
    }

    @Test func `credentials override the file, and the environment overrides credentials`() throws {
        let file = "database_url = \"host=a\"\n"
        var credentials = DatabaseCredentials()
        credentials.areHandedOver = true
        credentials.databaseURL = "host=b"
        credentials.databasePasswordFile = "/run/credentials/database_password"
        func load(_ environment: [String: String]) throws -> Configuration {
            try Configuration(
                files: [named("t.toml", file)], credentials: credentials, environment: environment, flags: [])
        }
        #expect(
            try load([:]).values["database_url"] == .init(value: "host=b", rank: .credential, origin: "credential"))
        #expect(
            try load(["TOKENKEEPER_DATABASE_URL": "host=c"]).values["database_url"]
                == .init(value: "host=c", rank: .environment, origin: "environment"))
        #expect(
            try load(["TOKENKEEPER_DATABASE_URL": "host=c password=d"]).address == DatabaseAddress("host=c password=d"))
        #expect(
            try load(["TOKENKEEPER_DATABASE_URL": "host=c"]).address
                == DatabaseAddress("host=c", passwordFile: "/run/credentials/database_password"))
        // A command that finds the service's password uses it for the configured database only. systemd has not passed it.
        credentials.areHandedOver = false
        #expect(
            try load([:]).address == DatabaseAddress("host=b", passwordFile: "/run/credentials/database_password"))
        #expect(try load(["TOKENKEEPER_DATABASE_URL": "host=c"]).address == DatabaseAddress("host=c"))
        #expect(
            try tokenkeeperd.Configuration(
                files: [], credentials: credentials, environment: [:], flags: ["database_url=host=d"]
            )
            .address == DatabaseAddress("host=d"))
        #expect(
            try tokenkeeperd.Configuration(
                files: [named("t.toml", "database_password_file = \"/p\"")], environment: [:],
                flags: ["database_url=host=d"]
            ).address == DatabaseAddress("host=d"))

        credentials.databaseURL = "host=b password=e"
        #expect(throws: ConfigurationError.self, "two passwords of the same rank are one too many") { try load([:]) }
    }

    @Test(arguments: [("250ms", 250), ("90s", 90_000), ("5m", 300_000), ("1h", 3_600_000), ("30d", 2_592_000_000)])
    func `durations are read and written alike`(text: String, milliseconds: Int) {
        #expect(DurationText.duration(text) == .milliseconds(milliseconds))
        #expect(DurationText.duration(DurationText.text(.milliseconds(milliseconds))) == .milliseconds(milliseconds))
    }

    @Test(arguments: ["", "1", "s", "1 s", "-1s", "1.5h", "1w", "1S", "٣s", "10001d", "1sm"])
    func `an invalid duration is refused`(text: String) {
        #expect(DurationText.duration(text) == nil)
    }
}

@Suite(.ownThread) struct `The documents` {
    private func file(_ path: String) throws -> String {
        let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../..")
        return try String(contentsOf: root.appendingPathComponent(path), encoding: .utf8)
    }

    @Test func `send.proxy names a proxy, or none, and otherwise the environment does`() throws {
        func route(_ settings: String...) throws -> PushRoute { try load(flags: settings).clientOptions.route }
        #expect(try route() == .environment)
        #expect(try route("send.proxy=none") == .direct)
        var proxy = try #require(PushProxy("https://u@h:1"))
        #expect(try route("send.proxy=https://u@h:1") == .proxy(proxy))
        proxy.passwordFile = "/p"
        #expect(try route("send.proxy=https://u@h:1", "send.proxy_password_file=/p") == .proxy(proxy))
        for wrong in ["http://u:hunter2@h", "socks5://u:hunter2@h:1", "u:hunter2@h:1"] {
            let found = problems("[send]\nproxy = \"\(wrong)\"")
            #expect(
                found == [
                    "t.toml:2: send.proxy is not usable, expected http://host:port, https://host:port or \"none\""
                ])
        }
        for wrong in [[], ["send.proxy=none"], ["send.proxy=http://h:1"], ["send.proxy=http://u:hunter2@h:1"]] {
            let found = problems(flags: wrong + ["send.proxy_password_file=/p"])
            #expect(found.count == 1 && found[0].contains("send.proxy_password_file is set"), "\(found)")
            #expect(!found.joined().contains("hunter2"))
        }
    }

    @Test func `on, off and blanks between topics are valid in variables and flags, but not in the file`() throws {
        #expect(throws: ConfigurationError.self) { try load("[drain]\nqueue_truncate = \"off\"") }
        #expect(try !load("[drain]\nqueue_truncate = false").queueTruncate)
        #expect(try !load(environment: ["TOKENKEEPER_DRAIN_QUEUE_TRUNCATE": "off"]).queueTruncate)
        #expect(throws: ConfigurationError.self) { try load("[credential.a]\ntopics = \"a b\"") }
    }

    @Test func `the default file has every setting commented out, with its meaning, range and default`() throws {
        var expected = ""
        var section = ""
        for setting in Setting.table {
            let dot = setting.key.firstIndex(of: ".")
            let ofSection = dot.map { String(setting.key[..<$0]) } ?? ""
            if ofSection != section { expected += "\n[\(ofSection)]\n" }
            section = ofSection
            let name = dot.map { String(setting.key[setting.key.index(after: $0)...]) } ?? setting.key
            let value = setting.defaultValue ?? setting.example ?? ""
            expected += "\n# \(setting.meaning)"
            if case .text = setting.kind {} else { expected += "\n# Expected: \(setting.expected)." }
            expected += setting.reloadable ? "" : " Needs a restart."
            expected += "\n#\(name) = \(setting.inTOML(value))\n"
        }
        let found = try file("systemd/tokenkeeperd.toml")
        #expect(found.contains(expected), "\(expected)")

        // As installed, it changes nothing. With every comment mark removed, it is still a valid configuration.
        #expect(try load(found).values.values.allSatisfy { $0.origin == "default" })
        let uncommented = found.split(separator: "\n").map { line in
            line.hasPrefix("#") && !line.hasPrefix("# ") && line.count > 1 ? String(line.dropFirst()) : String(line)
        }.joined(separator: "\n")
        let all = try load(uncommented)
        #expect(Setting.table.allSatisfy { all.values[$0.key]?.origin.hasPrefix("t.toml:") == true })
        #expect(all.credentials.map(\.name) == ["main", "old"])
        for setting in Setting.ofCredentials {
            #expect(
                all.values.keys.contains { $0.hasPrefix("credential.") && $0.hasSuffix("." + setting.key) },
                "\(setting.key)")
        }
    }

    @Test func `the man pages name every setting with its default, every command and every exit status`() throws {
        let settings = try file("man/tokenkeeperd.toml.5")
        for setting in Setting.table {
            let needsRestart = setting.reloadable ? "" : "; restart"
            let head = ".BR \(setting.key) \" (default: \(setting.documentedDefault ?? "unset")\(needsRestart)"
            #expect(settings.contains(head), "\(head)")
        }
        for setting in Setting.ofCredentials {
            #expect(settings.contains(".BR credential.NAME.\(setting.key)"), "\(setting.key)")
        }
        let page = try file("man/tokenkeeperd.8")
        for command in Tokenkeeperd.configuration.subcommands {
            let name = command._commandName.replacingOccurrences(of: "-", with: "\\-")
            #expect(page.contains(".B tokenkeeperd \(name)\n") && page.contains("\n.B \(name)\n"), "\(name)")
        }
        let commands = try #require(page.firstRange(of: ".SH COMMANDS")).upperBound
        let names = Tokenkeeperd.configuration.groupedSubcommands.flatMap { group in
            [".SS \(group.name)"] + group.subcommands.map { ".TP\n.B \($0._commandName)" }
        }
        let places = names.map { page[commands...].firstRange(of: $0.replacing("-", with: "\\-") + "\n")?.lowerBound }
        #expect(places.allSatisfy { $0 != nil } && places.compactMap(\.self) == places.compactMap(\.self).sorted())
        for status in [ExitStatus.success, .usage, .unavailable, .failed, .output, .busy, .configuration] {
            #expect(page.contains(".B \(status.rawValue)\n"))
        }
    }

    @Test func `the man page lists every option`() throws {
        let page = try file("man/tokenkeeperd.8")
        let help = try ProgramRun([DaemonProcess.program, "--experimental-dump-help"]).output
        let options = try NSRegularExpression(pattern: #""kind" : "long",\s*"name" : "([a-z-]+)""#)
            .matches(in: help, range: NSRange(help.startIndex..., in: help))
            .compactMap { Range($0.range(at: 1), in: help).map { String(help[$0]) } }
        #expect(Set(options).isSuperset(of: ["config", "set", "owner", "dry-run"]), "the pattern finds them")
        for option in Set(options) {
            let name = option.replacingOccurrences(of: "-", with: "\\-")
            #expect(page.contains("\\-\\-\(name)"), "\(option)")
        }
    }

    @Test func `the package, the man pages and the daemon have the same version`() throws {
        let version = Daemon.version.description
        #expect(try file("debian/changelog").hasPrefix("tokenkeeperd (\(version)) "))
        #expect(try file("man/tokenkeeperd.8").contains("\"tokenkeeperd \(version)\""))
        #expect(try file("man/tokenkeeperd.toml.5").contains("\"tokenkeeperd \(version)\""))
        #expect(try file("CHANGELOG.md").contains("## \(version)"))
        #expect(try file("README.md").contains("./tokenkeeperd_\(version)_amd64.deb"))
    }
}
