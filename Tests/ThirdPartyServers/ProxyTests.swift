import APNsFeedback
import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

/// The client and the daemon, through proxies of Debian's to the fake APNs.
@Suite(.ownThread, .serialized) struct `Through a proxy` {
    let files: TestAuthority
    let apns: FakeAPNs

    /// The password as it is in a URL.
    static let encoded = "pass%3Aword%40%2F%2541"

    init() throws {
        files = try TestAuthority()
        var options = FakeOptions(files)
        options.clientAuthority = files.certificate
        options.requiresProviderToken = false
        apns = try FakeAPNs.start(options)
    }

    private func proxy(_ kind: ServerKind, before port: Int? = nil) throws -> ServerProcess {
        let server = try ServerProcess(kind, files, before: port ?? apns.port)
        try server.start()
        return server
    }

    /// Sends requests with a client certificate.
    private func send(_ count: Int, through url: String, to port: Int? = nil) throws -> [PushOutcome] {
        let pair = try files.clientCertificate("client", topic: "com.example.app")
        let certificate = try ClientCertificate(
            pem: SecretBytes(Data(contentsOf: URL(fileURLWithPath: pair.certificate))),
            key: SecretBytes(Data(contentsOf: URL(fileURLWithPath: pair.key))), at: .now)
        let options = PushClientOptions(
            servers: [.production: PushServer(host: "localhost", port: port ?? apns.port)],
            authorityFile: files.certificate, route: .proxy(try #require(PushProxy(url))))
        let identity = PushIdentity(certificateChainPEM: certificate.chainPEM, keyPEM: certificate.keyPEM)
        return try sendAll((1...count).map(alert), identity, options)
    }

    private func url(_ scheme: String, _ server: ServerProcess, password: String = encoded) -> String {
        "\(scheme)://\(ServerKind.proxyUser):\(password)@localhost:\(server.port)"
    }

    private func isAnswered(_ outcome: PushOutcome) -> Bool {
        if case .answered(let answer) = outcome.end { answer.status == 200 && outcome.sends == 1 } else { false }
    }

    // The client ------------------------------------------------------------------------------------------------------

    @Test(arguments: [false, true])
    func `requests go through a tunnel, and the proxy sees no client certificate`(isEncrypted: Bool) throws {
        let proxy = try proxy(.apacheProxy(isEncrypted: isEncrypted))
        let outcomes = try send(1000, through: url(isEncrypted ? "https" : "http", proxy))
        #expect(
            outcomes.count(where: isAnswered) == 1000, "\(outcomes.first { !isAnswered($0) }.map { "\($0.end)" } ?? "")"
        )
        #expect(apns.records.connections > 0)
        // Apache logs a tunnel when it ends.
        let line = "CONNECT localhost:\(apns.port) HTTP/1.1, user tunnel, status 200, certificate"
        try eventually("the proxy logs the tunnel") { proxy.log.contains(line) }
        #expect(proxy.log.contains("\(line) \(isEncrypted ? "NONE" : "-")"))
    }

    @Test func `a proxy that also speaks HTTP/2 is offered HTTP/1.1 only`() throws {
        let inner = try proxy(.apacheProxy(isEncrypted: false))
        let outer = try proxy(.nghttpxProxy, before: inner.port)
        let outcomes = try send(1000, through: url("https", outer))
        #expect(
            outcomes.count(where: isAnswered) == 1000, "\(outcomes.first { !isAnswered($0) }.map { "\($0.end)" } ?? "")"
        )
    }

    @Test func `a proxy that refuses is named, and its password is not`() throws {
        let plain = try proxy(.apacheProxy(isEncrypted: false))
        let encrypted = try proxy(.apacheProxy(isEncrypted: true))
        let dead = try proxy(.nghttpxProxy, before: 1)
        let cases: [(url: String, port: Int?, message: String)] = [
            (url("http", plain, password: "hunter2"), nil, "response 407"),
            (url("https", encrypted, password: "hunter2"), nil, "response 407"),
            (url("http", plain), apns.port + 1, "response 403"),
            (url("https", dead), nil, "response 502"),
            ("http://tunnel:hunter2@localhost:1", nil, "Failed to connect to localhost port 1"),
            ("http://tunnel:hunter2@proxy.invalid:3128", nil, "Could not resolve proxy: proxy.invalid"),
            ("https://tunnel:hunter2@localhost:\(plain.port)", nil, "wrong version number"),
            ("http://tunnel:hunter2@localhost:\(encrypted.port)", nil, "Proxy CONNECT aborted"),
        ]
        for (url, port, message) in cases {
            let outcome = try #require(try send(1, through: url, to: port).first)
            guard case .unanswered(let failure) = outcome.end else {
                Issue.record("\(outcome.end)")
                continue
            }
            let place = url.replacing(/\/\/.*@/, with: "//")
            #expect(
                failure.message.contains(message) && failure.message.hasSuffix("(through the proxy \(place))"),
                "\(failure.message)")
            #expect(!failure.mayHaveArrived && outcome.sends == 0, "\(failure.message)")
            #expect(!failure.message.contains("hunter2") && !failure.message.contains("pass"), "\(failure.message)")
        }
        #expect(apns.records.connections == 0)
    }

    @Test func `the certificate of an HTTPS proxy is verified`() throws {
        let stranger = try TestAuthority()
        defer { try? FileManager.default.removeItem(atPath: stranger.folder) }
        let server = try ServerProcess(.apacheProxy(isEncrypted: true), stranger, before: apns.port)
        try server.start()
        let outcome = try #require(try send(1, through: url("https", server)).first)
        guard case .unanswered(let failure) = outcome.end else {
            Issue.record("\(outcome.end)")
            return
        }
        #expect(failure.kind == .tls && failure.message.contains("(through the proxy https://localhost:"))
        #expect(apns.records.connections == 0 && !server.log.contains("CONNECT"))
    }

    // The daemon ------------------------------------------------------------------------------------------------------

    enum Source: CaseIterable {
        case setting, passwordFile, environment, none
    }

    @Test(arguments: Source.allCases)
    func `the daemon sends through the proxy, and logs where it is but not its password`(_ source: Source) throws {
        let proxy = try proxy(.apacheProxy(isEncrypted: true))
        let database = try TestCluster.shared.database()
        let passwordFile = "\(files.folder)/password-\(source)"
        try "\(ServerKind.proxyPassword)\n".write(toFile: passwordFile, atomically: true, encoding: .utf8)
        var environment = ["https_proxy": "", "HTTPS_PROXY": "", "all_proxy": "", "ALL_PROXY": "", "no_proxy": ""]
        var settings = [
            "send.production_server=localhost:\(apns.port)", "send.ca_file=\(files.certificate)",
            "credential.main.key_file=\(files.signingKeyFile)", "credential.main.key_id=\(files.signingKey.id)",
            "credential.main.team_id=\(files.signingKey.team)", "credential.main.topics=com.example.*",
            "drain.poll_idle=100ms", "log.level=trace",
        ]
        switch source {
        case .setting: environment["TOKENKEEPER_SEND_PROXY"] = url("https", proxy)
        case .passwordFile:
            settings += [
                "send.proxy=https://tunnel@localhost:\(proxy.port)", "send.proxy_password_file=\(passwordFile)",
            ]
        case .environment: environment["https_proxy"] = url("https", proxy)
        case .none:
            environment["https_proxy"] = url("https", proxy)
            settings.append("send.proxy=none")
        }
        let daemon = try DaemonProcess(database.url(), settings: settings, environment: environment)
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), '{\"aps\":{\"alert\":\"1\"}}' FROM generate_series(1, 100) AS i"
        )
        try eventually("all are answered") {
            try database.psql("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_stat WHERE status = 200")
                == "100"
        }
        #expect(daemon.stop() == 0)
        let log = daemon.logged
        #expect(!log.contains(ServerKind.proxyPassword) && !log.contains(Self.encoded))
        let line = "connects to APNs through a proxy"
        if source == .none {
            #expect(!log.contains(line) && !proxy.log.contains("CONNECT"))
        } else {
            #expect(log.contains(line) && log.contains("proxy=https://localhost:\(proxy.port)"))
            try eventually("the proxy logs the tunnel") { proxy.log.contains("user tunnel, status 200") }
        }
    }
}
