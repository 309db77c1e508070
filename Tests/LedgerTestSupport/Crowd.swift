import Foundation
import Synchronization

/// Clients that treat a server for scrapes badly until they leave: 1,000 scrapes a second, slow readers, requests that do not end, headers
/// of ten megabytes, and more connections than the server takes.
public final class Crowd: Sendable {
    private let hasLeft = Atomic(false)
    private let served = Atomic(0)
    private let made = Atomic(0)
    private let refused = Atomic(false)
    private let threads = DispatchGroup()

    public init(port: Int) {
        let request = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
        let long = "GET /metrics HTTP/1.1\r\nX: " + String(repeating: "x", count: 10 << 20)
        start(port, clients: 0, every: .milliseconds(1)) { [self] client in
            client.send(request)
            if client.read().hasPrefix("HTTP/1.1 200 ") { served.add(1, ordering: .relaxed) }
        }
        // They read nothing.
        start(port, clients: 40, every: .milliseconds(5)) { $0.send(request) }
        start(port, clients: 40, every: .milliseconds(5)) { $0.send("GET /metrics HTTP/1.1\r\nHost:") }
        start(port, clients: 0, every: .milliseconds(20)) { $0.send(long) }
    }

    /// Makes connections, one after the other, and keeps the latest ones.
    ///
    /// - Parameters:
    ///   - clients: How many connections to keep.
    ///   - pause: From one connection to the next, unless the server is slower.
    private func start(
        _ port: Int, clients: Int, every pause: Duration, _ act: @escaping @Sendable (PlainClient) -> Void
    ) {
        threads.enter()
        let thread = Thread { [self] in
            var open: [PlainClient] = []
            var next = ContinuousClock.now
            while !hasLeft.load(ordering: .relaxed) {
                if let client = try? PlainClient("127.0.0.1", port) {
                    made.add(1, ordering: .relaxed)
                    act(client)
                    open.append(client)
                    if open.count > clients { open.removeFirst() }
                } else {
                    refused.store(true, ordering: .relaxed)
                }
                next = max(next + pause, .now - pause)
                usleep(UInt32(max(0, ContinuousClock.now.duration(to: next) / .microseconds(1))))
            }
            threads.leave()
        }
        thread.start()
    }

    /// How many connections there have been.
    public var connections: Int { made.load(ordering: .relaxed) }

    /// How many scrapes got the page.
    public var scrapes: Int { served.load(ordering: .relaxed) }

    /// Whether the server has refused a connection.
    public var wasRefused: Bool { refused.load(ordering: .relaxed) }

    /// Ends all clients.
    public func leave() {
        hasLeft.store(true, ordering: .relaxed)
        threads.wait()
    }
}
