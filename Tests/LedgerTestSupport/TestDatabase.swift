import Foundation
import TokenLedger

/// A database of the cluster, for one test.
public struct TestDatabase: Sendable {
    public let cluster: TestCluster
    public let name: String
    private let sessions = IdleSessions()

    public init(cluster: TestCluster, name: String) {
        self.cluster = cluster
        self.name = name
    }

    public func url(user: String = "a_daemon", port: Int? = nil, overTCP: Bool = false) -> String {
        cluster.url(database: name, user: user, port: port, overTCP: overTCP)
    }

    public func connect(user: String = "owner") throws -> Connection {
        try cluster.connect(database: name, user: user)
    }

    /// Runs statements as `psql -c` does, and returns their rows as `psql -XAtq` prints them.
    ///
    /// A `psql` process would take 46 ms per call.
    @discardableResult
    public func psql(_ sql: String, user: String = "owner") throws -> String {
        try sessions.run(sql, user: user, url: url(user: user))
    }

    /// Runs one statement in a real `psql`, with this input.
    @discardableResult
    public func psql(_ sql: String, user: String = "owner", input: String) throws -> String {
        try TestCluster.run(
            ["psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", url(user: user), "-c", sql], input: input
        ).trimmingCharacters(in: .newlines)
    }
}

extension TestDatabase {
    /// Does what a daemon does ten minutes after `forget`. It waits for transactions of other databases, too; see ``TestCluster/ofErasures``.
    public func finishErasures() throws {
        try eventually("the erasures are finished") {
            try psql("SELECT tokenkeeper.finish_erasures('0'); SELECT count(*) FROM tokenkeeper.erasure").hasSuffix(
                "\n0")
        }
    }
}
