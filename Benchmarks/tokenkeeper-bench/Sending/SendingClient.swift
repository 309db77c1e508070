import Foundation
import LedgerTestSupport

/// A client that sends a number of requests in its own process, and its own account of them.
struct SendingClient {
    let name: String
    /// The command line.
    let command: (_ server: SendingServer, _ requests: Int) throws -> [String]
    /// Reads its output.
    let account: (_ printed: String) throws -> Account

    /// A client's own account of what it did.
    struct Account: Codable {
        /// From before the first connection to the last response.
        var seconds: Double
        /// The number of responses, by status.
        var answers: [Int: Int]
        var connections: Int?
        /// How often a request was sent, if the client reports it.
        var sends: Int?
        /// Resident memory in bytes after a quarter of the responses, and after all of them.
        var memory: [Int]?
    }

    /// A client may not take longer.
    private static let patience = 600

    /// - Returns: The sample. Its server's time is the receiving process's, and its daemon's time is the client's.
    func send(_ requests: Int, to server: SendingServer) throws -> (sample: Sample, account: Account) {
        let command = ["timeout", "\(Self.patience)"] + (try self.command(server, requests))
        let server = server.pid
        let (before, serverBefore) = (Self.childrenSeconds, ProcessorTime.seconds(of: server))
        let run = try ProgramRun(command)
        let (after, serverAfter) = (Self.childrenSeconds, ProcessorTime.seconds(of: server))
        guard run.status == 0 else {
            throw TestFailure("\(name): exit \(run.status): \(run.errors.suffix(2000)) \(run.output.suffix(500))")
        }
        let account = try account(run.output)
        let sample = Sample(
            rows: requests, seconds: account.seconds, serverSeconds: serverAfter - serverBefore,
            daemonSeconds: after - before)
        return (sample, account)
    }

    /// The processor time of our ended child processes: while a client runs, no other one ends.
    private static var childrenSeconds: Double {
        var usage = rusage()
        getrusage(__rusage_who_t(RUSAGE_CHILDREN.rawValue), &usage)
        func seconds(_ time: timeval) -> Double { Double(time.tv_sec) + Double(time.tv_usec) / 1_000_000 }
        return seconds(usage.ru_utime) + seconds(usage.ru_stime)
    }

    // MARK: - The three

    static let inFlight = 500
    static let connections = 2
    private static let ourName = "tokenkeeperd's client"

    /// This program as it was at an earlier revision, to compare the clients of both.
    struct EarlierBuild {
        var revision: String
        /// Its path.
        var program: String
    }

    /// The daemon's own client, by this program's mode `push`.
    ///
    /// - Parameters:
    ///   - build: Another build of this program; nil for this one.
    ///   - port: Where the client connects; nil for the server's own port.
    ///   - more: More arguments of `push`.
    static func ours(
        _ work: SendingWork, build: EarlierBuild? = nil, connections: Int = connections, port: Int? = nil,
        more: [String] = []
    ) -> SendingClient {
        SendingClient(name: build.map { "\(ourName) at \($0.revision)" } ?? ourName) { server, requests in
            [
                build?.program ?? "/proc/\(getpid())/exe", "push", "--port", "\(port ?? server.port)",
                "--authority-file", work.authorityFile, "--key-file", work.keyFile, "--requests", "\(requests)",
                "--in-flight", "\(inFlight)", "--connections", "\(connections)",
            ] + more
        } account: { printed in
            try JSONDecoder().decode(Account.self, from: Data(printed.utf8))
        }
    }

    /// nghttp2's own load generator. It verifies no certificate, and keeps no response.
    static func h2load(_ work: SendingWork) -> SendingClient {
        SendingClient(name: "h2load") { server, requests in
            [
                "h2load", "-n", "\(requests)", "-c", "\(connections)", "-m", "\(inFlight / connections)",
                "-i", try work.addresses(port: server.port), "-d", work.payloadFile,
                "-H", "apns-topic: \(SendingWork.topic)", "-H", "apns-push-type: alert",
                "-H", "authorization: bearer \(try work.providerToken())",
            ]
        } account: { printed in
            // finished in 3.21s, …  |  status codes: 100000 2xx, 0 3xx, 0 4xx, 0 5xx
            guard let seconds = printed.firstMatch(of: #/finished in ([0-9.]+)(m?)s/#),
                let value = Double(seconds.1),
                let codes = printed.firstMatch(
                    of: #/status codes: ([0-9]+) 2xx, ([0-9]+) 3xx, ([0-9]+) 4xx, ([0-9]+) 5xx/#)
            else { throw TestFailure("h2load says: \(printed.suffix(1000))") }
            let counts = [codes.1, codes.2, codes.3, codes.4].map { Int($0) ?? 0 }
            return Account(
                seconds: seconds.2.isEmpty ? value : value / 1000,
                answers: Dictionary(uniqueKeysWithValues: zip([200, 300, 400, 500], counts)).filter { $1 > 0 })
        }
    }
}
