import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `The server for scrapes` {
    private func start(life: Duration = MonitoringServer.longestLife) throws -> (server: MonitoringServer, port: Int) {
        let server = try MonitoringServer(.tcp(host: "127.0.0.1", port: 0), life: life, forms: ["/form"]) { request in
            switch request.path {
            case "/metrics": .now(MonitoringPage(text: "tokenkeeper_x 1\n"))
            case "/live": .now(MonitoringPage(isAlwaysServed: true, text: "ok\n"))
            case "/large": .now(MonitoringPage(text: String(repeating: "x", count: 16 << 20)))
            case "/form": .now(MonitoringPage(text: "form: \(request.form ?? "none")\n"))
            case "/later":
                .later(within: .seconds(600), otherwise: MonitoringPage(text: "late\n")) { respond in
                    DispatchQueue.global().async { respond(MonitoringPage(text: "later\n")) }
                }
            case "/never": .later(within: .seconds(600), otherwise: MonitoringPage(text: "late\n")) { _ in }
            case "/late":
                .later(within: .zero, otherwise: MonitoringPage(status: .gone, text: "late\n")) { _ in }
            case "/twice":
                .later(within: .seconds(600), otherwise: MonitoringPage(text: "late\n")) { respond in
                    for _ in 1...2 { respond(MonitoringPage(text: "later\n")) }
                }
            case "/local": .now(MonitoringPage(text: "local: \(request.isLocal)\n"))
            default: nil
            }
        }
        return (server, try #require(server.port))
    }

    private func get(_ port: Int, _ request: String = "GET /metrics HTTP/1.1") throws -> String {
        let client = try PlainClient("127.0.0.1", port)
        client.send("\(request)\r\nHost: a\r\n\r\n")
        return client.read()
    }

    @Test func `GET gets the page, and HEAD only its head`() throws {
        let (server, port) = try start()
        defer { server.stop() }
        let page = try get(port)
        #expect(page.hasPrefix("HTTP/1.1 200 OK\r\n"))
        #expect(page.hasSuffix("\r\n\r\ntokenkeeper_x 1\n"))
        #expect(page.contains("content-length: 16\r\n"))
        #expect(page.contains("connection: close\r\n"))
        #expect(try get(port, "GET /metrics?name[]=x HTTP/1.0").hasSuffix("tokenkeeper_x 1\n"))
        let head = try get(port, "HEAD /metrics HTTP/1.1")
        #expect(head.contains("content-length: 16\r\n"))
        #expect(head.hasSuffix("\r\n\r\n"))
    }

    @Test func `other paths and methods are refused`() throws {
        let (server, port) = try start()
        defer { server.stop() }
        #expect(try get(port, "GET /etc/passwd HTTP/1.1").hasPrefix("HTTP/1.1 404 "))
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            #expect(try get(port, "\(method) /metrics HTTP/1.1").hasPrefix("HTTP/1.1 405 "), "\(method)")
        }
        let client = try PlainClient("127.0.0.1", port)
        client.send("\u{16}\u{3}\u{1} a client that speaks TLS\r\n\r\n")
        #expect(!client.read().contains("tokenkeeper"))
        #expect(try get(port).hasPrefix("HTTP/1.1 200 "))
    }

    /// Clients that send this and read nothing.
    private func clients(_ count: Int, _ port: Int, sending text: String) throws -> [PlainClient] {
        try (0..<count).map { _ in
            let client = try PlainClient("127.0.0.1", port)
            client.send(text)
            return client
        }
    }

    @Test func `a scrape gets 503 while sixteen others are being served, and a health check does not`() throws {
        let (server, port) = try start(life: .seconds(600))
        defer { server.stop() }
        // Requests that do not end are not being served.
        let idle = try clients(MonitoringServer.mostAnswered, port, sending: "GET /metrics HTTP/1.1\r\n")
        #expect(try get(port).hasPrefix("HTTP/1.1 200 "))
        var others = try clients(
            MonitoringServer.mostAnswered, port, sending: "GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        try eventually("all of them are being served") { try get(port).hasPrefix("HTTP/1.1 503 ") }
        #expect(try get(port, "GET /live HTTP/1.1").hasPrefix("HTTP/1.1 200 "))
        others = []
        try eventually("it serves again") { try get(port).hasPrefix("HTTP/1.1 200 ") }
        withExtendedLifetime((others, idle)) {}
    }

    @Test func `only a form takes a POST, of at most 4 KiB`() throws {
        let (server, port) = try start()
        defer { server.stop() }
        func post(_ path: String, _ body: String) throws -> String {
            let client = try PlainClient("127.0.0.1", port)
            client.send("POST \(path) HTTP/1.1\r\nHost: a\r\nContent-Length: \(body.utf8.count)\r\n\r\n\(body)")
            return client.read()
        }
        #expect(try post("/form", "q=aa").hasSuffix("\r\n\r\nform: q=aa\n"))
        #expect(try get(port, "GET /form HTTP/1.1").hasSuffix("\r\n\r\nform: none\n"))
        #expect(try post("/form?q=bb", "").hasSuffix("\r\n\r\nform: \n"))
        #expect(try post("/metrics", "q=aa").hasPrefix("HTTP/1.1 405 "))
        #expect(try post("/form", String(repeating: "x", count: 4097)).hasPrefix("HTTP/1.1 413 "))
    }

    @Test func `pages that come later hold up no other, also if they never come`() throws {
        let (server, port) = try start(life: .seconds(600))
        defer { server.stop() }
        #expect(try get(port, "GET /later HTTP/1.1").hasSuffix("\r\n\r\nlater\n"))
        let head = try get(port, "HEAD /later HTTP/1.1")
        #expect(head.contains("content-length: 6\r\n") && head.hasSuffix("\r\n\r\n"))
        let waiting = try clients(
            MonitoringServer.mostAnswered, port, sending: "GET /never HTTP/1.1\r\nHost: a\r\n\r\n")
        #expect(try get(port).hasPrefix("HTTP/1.1 200 "))
        #expect(try get(port, "GET /later HTTP/1.1").hasPrefix("HTTP/1.1 200 "))
        withExtendedLifetime(waiting) {}
    }

    @Test func `a request that a proxy on this machine passes on is not this machine's`() throws {
        let (server, port) = try start()
        defer { server.stop() }
        #expect(try get(port, "GET /local HTTP/1.1").hasSuffix("\r\n\r\nlocal: true\n"))
        for header in ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"] {
            #expect(try get(port, "GET /local HTTP/1.1\r\n\(header): b").hasSuffix("local: false\n"), "\(header)")
        }
    }

    @Test func `of requests that are sent at once, only the first is answered`() throws {
        let asked = Mutex(0)
        let server = try MonitoringServer(.tcp(host: "127.0.0.1", port: 0), life: .seconds(600)) { _ in
            asked.withLock { $0 += 1 }
            return .later(within: .seconds(600), otherwise: MonitoringPage(text: "late\n")) { respond in
                DispatchQueue.global().async { respond(MonitoringPage(text: "later\n")) }
            }
        }
        defer { server.stop() }
        let client = try PlainClient("127.0.0.1", try #require(server.port))
        client.send(String(repeating: "GET /later HTTP/1.1\r\nHost: a\r\n\r\n", count: 50))
        #expect(client.read().hasSuffix("\r\n\r\nlater\n"))
        #expect(asked.withLock { $0 } == 1)
    }

    @Test func `a page that does not come in time is replaced by another one, and only one is sent`() throws {
        let (server, port) = try start(life: .seconds(600))
        defer { server.stop() }
        #expect(try get(port, "GET /late HTTP/1.1").hasPrefix("HTTP/1.1 410 "))
        #expect(try get(port, "GET /twice HTTP/1.1").components(separatedBy: "HTTP/1.1").count == 2)
    }

    @Test func `one connection too many ends the oldest, and is served`() throws {
        let (server, port) = try start(life: .seconds(600))
        defer { server.stop() }
        let others = try clients(
            MonitoringServer.mostConnections + 10, port, sending: "GET /metrics HTTP/1.1\r\n")
        #expect(try get(port, "GET /live HTTP/1.1").hasPrefix("HTTP/1.1 200 "))
        #expect(others[0].read() == "")
        #expect(others[9].read() == "")
        others[others.count - 1].send("Host: a\r\n\r\n")
        #expect(others[others.count - 1].read().hasPrefix("HTTP/1.1 200 "), "a newer one is still open")
    }

    @Test func `a request of ten megabytes ends its connection`() throws {
        let (server, port) = try start()
        defer { server.stop() }
        let client = try PlainClient("127.0.0.1", port)
        client.send("GET /metrics HTTP/1.1\r\nX: ")
        #expect(!client.send(String(repeating: "x", count: 10 << 20)))
        #expect(!client.read().contains("tokenkeeper"))
        #expect(try get(port).hasPrefix("HTTP/1.1 200 "))
    }

    @Test func `a request that does not end ends with its connection`() throws {
        let (server, port) = try start(life: .milliseconds(50))
        defer { server.stop() }
        let client = try PlainClient("127.0.0.1", port)
        client.send("GET /metrics HTTP/1.1\r\nHost:")
        #expect(client.read() == "")
    }

    @Test func `a page that nobody reads ends with its connection`() throws {
        let server = try MonitoringServer(.tcp(host: "127.0.0.1", port: 0), life: .milliseconds(50)) { _ in
            .now(MonitoringPage(text: String(repeating: "x", count: 16 << 20)))
        }
        defer { server.stop() }
        let client = try PlainClient("127.0.0.1", try #require(server.port))
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        try eventually("the server has closed the connection") { !client.send("x") }
    }

    @Test func `it listens on IPv6 and on a Unix socket`() throws {
        let v6 = try MonitoringServer(.tcp(host: "::1", port: 0)) { _ in .now(MonitoringPage(text: "six\n")) }
        defer { v6.stop() }
        let six = try PlainClient("::1", try #require(v6.port))
        six.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        #expect(six.read().hasSuffix("six\n"))
        let path = Self.socketPath
        defer { unlink(path) }
        for _ in 1...2 {
            try Self.leaveSocket(at: path)
            let server = try MonitoringServer(.unix(path)) { _ in .now(MonitoringPage(text: "unix\n")) }
            defer { server.stop() }
            let client = try PlainClient(path)
            client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            #expect(client.read().hasSuffix("unix\n"))
            let mode = try FileManager.default.attributesOfItem(atPath: path)[.posixPermissions] as? Int
            #expect(mode == 0o660)
        }
    }

    /// What a process leaves that was killed while it listened.
    private static func leaveSocket(at path: String) throws {
        let descriptor = socket(AF_UNIX, Int32(SOCK_STREAM.rawValue), 0)
        defer { close(descriptor) }
        let bound = PlainClient.withAddress(path) { bind(descriptor, $0, $1) }
        #expect(bound == 0 && listen(descriptor, 1) == 0)
    }

    private static var socketPath: String { NSTemporaryDirectory() + "\(UUID().uuidString.prefix(8)).sock" }

    @Test func `a socket that somebody listens on stays`() throws {
        let path = Self.socketPath
        defer { unlink(path) }
        let first = try MonitoringServer(.unix(path)) { _ in .now(MonitoringPage(text: "first\n")) }
        defer { first.stop() }
        let error = #expect(throws: SocketFile.Occupied.self) { try MonitoringServer(.unix(path)) { _ in nil } }
        #expect(error?.description == "another process listens at \(path)")
        let client = try PlainClient(path)
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        #expect(client.read().hasSuffix("first\n"))
    }

    @Test func `a file that is no socket stays, and so does what a link names`() throws {
        let (file, link) = (Self.socketPath, Self.socketPath)
        defer {
            unlink(file)
            unlink(link)
        }
        try "mine".write(toFile: file, atomically: false, encoding: .utf8)
        try FileManager.default.createSymbolicLink(atPath: link, withDestinationPath: file)
        for path in [file, link] {
            let error = #expect(throws: SocketFile.Occupied.self) { try MonitoringServer(.unix(path)) { _ in nil } }
            #expect(error?.description == "\(path) exists and is not a socket")
        }
        #expect(try String(contentsOfFile: file, encoding: .utf8) == "mine")
        #expect(try FileManager.default.destinationOfSymbolicLink(atPath: link) == file)
    }

    @Test func `a port in use is an error`() throws {
        let (server, port) = try start()
        defer { server.stop() }
        #expect(throws: (any Error).self) {
            try MonitoringServer(.tcp(host: "127.0.0.1", port: port)) { _ in nil }
        }
    }
}
