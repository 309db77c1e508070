import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// The real daemon, scraped.
@Suite(.ownThread) struct `A scraped daemon` {
    private static func value(_ name: String, _ port: Int) -> String? {
        PlainClient.get("/metrics", port).split(separator: "\n").first { $0.hasPrefix("tokenkeeper_\(name) ") }
            .map { String($0.dropFirst("tokenkeeper_\(name) ".count)) }
    }

    private static func results(
        _ environment: String, _ topic: String, _ status: String, _ reason: String = ""
    ) -> String {
        #"results_total{environment="\#(environment)",topic="\#(topic)",status="\#(status)",reason="\#(reason)"}"#
    }

    @Test func `it is alive without PostgreSQL, ready with it, and counts what it does`() throws {
        let cluster = try TestCluster()
        let database = try cluster.emptyDatabase()
        cluster.stop()
        let port = try TestCluster.freePort()
        let daemon = try DaemonProcess(
            database.url(user: "postgres"), settings: ["metrics.listen=127.0.0.1:\(port)"], arguments: ["--migrate"])
        func status(_ path: String) -> String { String(PlainClient.get(path, port).dropFirst(9).prefix(3)) }

        try eventually("it serves") { status("/live") == "200" }
        #expect(status("/ready") == "503")
        #expect(Self.value("database_up", port) == "0")
        #expect(Self.value("database_queue_results", port) == nil)
        try eventually("it says what it waits for") {
            PlainClient.get("/ready", port).contains("\r\n\r\nwaiting for PostgreSQL: ")
        }
        try eventually("it counts the error") {
            PlainClient.get("/metrics", port).contains(#"tokenkeeper_database_errors_total{sqlstate_class="none"} "#)
        }

        try cluster.start()
        try eventually("it is ready") { status("/ready") == "200" }
        try eventually("it has seen the queue") { Self.value("database_queue_results", port) == "0" }
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            VALUES ('t', 'aa', 200, NULL), ('t', 'bb', 410, \(goneBody)), ('t', 'not hex', 410, \(goneBody))
            """, user: "postgres")
        try eventually("it counts them") {
            Self.value("results_rejected_total", port) == "1"
                && Self.value(Self.results("production", "other", "200"), port) == "1"
                && Self.value(Self.results("production", "other", "410", "Unregistered"), port) == "1"
                && Self.value(Self.results("other", "other", "410", "(rejected)"), port) == "1"
        }
        // A topic with a policy has a label.
        try database.psql(
            "INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES ('a.\"topic\"', 'observe')", user: "postgres")
        try eventually("the topic has its label") {
            try database.psql(
                "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('a.\"topic\"', 'aa', 200)",
                user: "postgres")
            return Self.value(Self.results("production", #"a.\"topic\""#, "200"), port) != nil
        }
        for histogram in ["drain_batch_duration_seconds", "database_statement_duration_seconds"] {
            let count = try #require(Self.value("\(histogram)_count", port).flatMap { Int($0) })
            #expect(count > 0)
        }
        #expect(Self.value("sweep_interval_seconds", port) == "3600")
        #expect(Self.value("database_up", port) == "1")
        #expect(Self.value("config_last_reload_successful", port) == "1")
        try eventually("the first sweep has finished") {
            PlainClient.get("/metrics", port).contains(
                "tokenkeeper_sweep_last_end_timestamp_seconds{outcome=\"finished\"}")
        }

        cluster.stop()
        try eventually("it is not ready") { status("/ready") == "503" }
        #expect(status("/live") == "200")
        #expect(Self.value(Self.results("production", "other", "410", "Unregistered"), port) == "1")
        try eventually("the state of the queue is too old to be told") {
            Self.value("database_queue_results", port) == nil
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `it drains even if its address for scrapes is in use`() throws {
        let database = try TestCluster.shared.database()
        let port = try TestCluster.freePort()
        let settings = ["metrics.listen=127.0.0.1:\(port)"]
        let first = try DaemonProcess(database.url(), settings: settings)
        try eventually("it serves") { PlainClient.get("/live", port).hasPrefix("HTTP/1.1 200 ") }
        let second = try DaemonProcess(database.url(), settings: settings)
        try eventually("it says so") { second.logged.contains("metrics cannot be served; everything else works") }
        try eventually("both drain") {
            try database.psql("SELECT count(*) FROM tokenkeeper.daemon WHERE stopped_at IS NULL") == "2"
        }
        #expect(first.stop() == 0)
        #expect(second.stop() == 0)
    }

    @Test func `while clients do their worst, it is alive, serves scrapes now and then, and drains`() throws {
        let database = try TestCluster.shared.database()
        let port = try TestCluster.freePort()
        let daemon = try DaemonProcess(database.url(), settings: ["metrics.listen=127.0.0.1:\(port)"])
        try eventually("it serves") { PlainClient.get("/live", port).hasPrefix("HTTP/1.1 200 ") }
        let crowd = Crowd(port: port)
        defer { crowd.leave() }
        try eventually("the crowd is there") { crowd.connections > 500 }
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(goneBody) FROM generate_series(1, 5000) AS i
            """, user: "a_sender")
        for _ in 1...20 {
            try eventually("it is alive") { PlainClient.get("/live", port).hasPrefix("HTTP/1.1 200 ") }
        }
        try eventually("it drains") {
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "5000"
        }
        try eventually("a scrape is served") { PlainClient.get("/metrics", port).hasPrefix("HTTP/1.1 200 ") }
        #expect(!crowd.wasRefused, "no connection was refused")
        crowd.leave()
        try eventually("it serves as before") { PlainClient.get("/metrics", port).hasPrefix("HTTP/1.1 200 ") }
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("error"), "\(daemon.logged)")
    }

    @Test func `the status page shows the state of the database, and who wrote what cannot change it`() throws {
        let database = try TestCluster.shared.database()
        let port = try TestCluster.freePort()
        let topic = "com.example.<script>"
        try database.psql(
            """
            SELECT tokenkeeper.register(md5(i::text) || md5('a' || i), '\(topic)') FROM generate_series(1, 1200) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            VALUES ('\(topic)', 'not hex', 410, \(goneBody)), ('\(topic)', repeat('ab', 32), 410, \(goneBody));
            """)
        let daemon = try DaemonProcess(database.url(), settings: ["metrics.listen=127.0.0.1:\(port)"])
        // On a busy machine a look takes a second, and the next one follows after twenty.
        try eventually("it shows the database", within: 120) {
            let page = PlainClient.get("/", port)
            return page.contains(
                "<a href=\"topic/production:com.example.%3Cscript%3E\">com.example.&lt;script&gt;</a>")
                && page.contains("<td class=\"number\" data-label=\"Active\"><span>1,200</span></td>")
                && page.contains("<dt>results rejected</dt><dd>1</dd>") && page.contains("Needs attention")
        }
        let page = PlainClient.get("/", port)
        #expect(page.hasPrefix("HTTP/1.1 200 OK\r\ncontent-type: text/html; charset=utf-8\r\n"))
        #expect(page.contains("\r\ncontent-security-policy: default-src 'none'; "))
        #expect(!page.contains("<script"))
        #expect(!page.contains("abababababab"))
        let own = PlainClient.get("/topic/production:com.example.%3Cscript%3E", port)
        #expect(
            own.hasPrefix("HTTP/1.1 200 ") && own.contains("\r\ncontent-security-policy: default-src 'none'; "),
            "\(own)")
        #expect(own.contains("<h2>com.example.&lt;script&gt; <span") && !own.contains("<script"))
        #expect(PlainClient.get("/topic/production:none", port).hasPrefix("HTTP/1.1 404 "))
        #expect(PlainClient.get("/campaign/7", port).hasPrefix("HTTP/1.1 404 "))
        #expect(PlainClient.get("/find", port).contains("<form method=\"post\" action=\"find\""))
        // What explain prints, and nothing of it in the log or in a URL.
        func find(_ text: String) throws -> String {
            let client = try PlainClient("127.0.0.1", port)
            client.send("POST /find HTTP/1.1\r\nHost: a\r\nContent-Length: \(text.utf8.count + 2)\r\n\r\nq=\(text)")
            return client.read()
        }
        let token = try database.psql("SELECT md5('1') || md5('a1')")
        let explained = try find("+\(token.uppercased())%0A")
        #expect(
            explained.contains("<pre>com.example.&lt;script&gt; (production) \(token.prefix(8))…\n"), "\(explained)")
        #expect(explained.contains("now: may be sent to: last registered at ") && !explained.contains(token))
        #expect(
            try find("ffffffffff").contains("no token that begins with these digits is known")
                || find("ffffffffff").contains("the token is not known"))
        #expect(try find("SCRIPT").contains("<a href=\"topic/production:com.example.%3Cscript%3E\">"))
        #expect(try find("%00").contains("<h2>Find</h2>"))
        #expect(!daemon.logged.contains(token.prefix(20)) && !daemon.logged.contains("/find"), "\(daemon.logged)")
        // The page shows the tokens at once; the hour is noted with the next look for warnings.
        try eventually("the hour is noted", within: 120) {
            try database.psql("SELECT sum(tokens) FROM tokenkeeper.token_count_hour WHERE state = 'active'") == "1200"
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `every path is refused under a name that a stranger may control`() throws {
        let database = try TestCluster.shared.database()
        let port = try TestCluster.freePort()
        let daemon = try DaemonProcess(
            database.url(),
            settings: ["metrics.listen=127.0.0.1:\(port)", "metrics.page=network", "metrics.hosts=tokens.example"])
        try eventually("it is ready") { PlainClient.get("/ready", port).hasPrefix("HTTP/1.1 200 ") }
        for path in ["/", "/metrics", "/live", "/ready", "/find", "/none"] {
            for (headers, isRefused) in [
                ("Host: evil.example:\(port)\r\n", true), ("Host: localhost\r\nHost: evil.example\r\n", true),
                ("Host: tokens.example:\(port)\r\n", false), ("Host: localhost:\(port)\r\n", false), ("", false),
            ] {
                let client = try PlainClient("127.0.0.1", port)
                client.send("GET \(path) HTTP/1.1\r\n\(headers)\r\n")
                let answer = client.read()
                #expect(
                    answer.hasPrefix("HTTP/1.1 ") && answer.hasPrefix("HTTP/1.1 403 ") == isRefused,
                    "\(path) \(headers): \(answer)")
            }
        }
        #expect(daemon.stop() == 0)
        #expect(daemon.logged.components(separatedBy: "refuses requests under a name").count == 2, "\(daemon.logged)")
    }

    @Test func `the status page can be turned off`() throws {
        let database = try TestCluster.shared.database()
        let port = try TestCluster.freePort()
        let daemon = try DaemonProcess(
            database.url(), settings: ["metrics.listen=127.0.0.1:\(port)", "metrics.page=off"])
        try eventually("it is ready") { PlainClient.get("/ready", port).hasPrefix("HTTP/1.1 200 ") }
        for path in ["/", "/find", "/campaign/1"] {
            #expect(PlainClient.get(path, port).hasPrefix("HTTP/1.1 404 "))
        }
        #expect(daemon.stop() == 0)
    }
}
