import LedgerTestSupport

/// A token of a set of shards.
struct ShardRow {
    let shard: Int
    let topic: String
    let token: String
}

/// A client that has a connection to each shard and brings each row to its own, or one connection to the router.
final class ShardClient {
    enum Way: String, CaseIterable {
        case straight = "straight to the shard"
        case routed = "through the router"
    }

    private let way: Way
    /// Either these, or those for COPY.
    private let clients: [PreparedClient]
    private let copying: [Session]

    init(_ way: Way, _ set: ShardSet, _ call: ShardCall) throws {
        self.way = way
        let databases = way == .straight ? set.shards : [set.router]
        if case .copy = call.kind {
            clients = []
            copying = try databases.map { try $0.cluster.session($0.name, user: call.user) }
        } else {
            clients = try databases.map { try PreparedClient($0, user: call.user) }
            copying = []
            for client in clients { try client.prepare("call", call.statement) }
        }
    }

    /// Calls the statement once for all of these rows, or, straight, once for those of each shard.
    func call(_ rows: ArraySlice<ShardRow>, _ values: (ArraySlice<ShardRow>) -> [String]) throws {
        for (number, part) in parts(rows) { try clients[number].call("call", values(part)) }
    }

    /// Copies the rows in one statement, or, straight, in one for each shard.
    func copy(_ statement: String, _ rows: ArraySlice<ShardRow>, _ line: (ShardRow) -> String) throws {
        for (number, part) in parts(rows) {
            try copying[number].copy(statement, rows: part.flatMap { Array(line($0).utf8) })
        }
    }

    private func parts(_ rows: ArraySlice<ShardRow>) -> [(Int, ArraySlice<ShardRow>)] {
        if way == .routed || clients.count + copying.count == 1 { return [(0, rows)] }
        if rows.count == 1 { return [(rows.first!.shard, rows)] }
        return Dictionary(grouping: rows, by: \.shard).sorted { $0.key < $1.key }.map { ($0.key, ArraySlice($0.value)) }
    }
}
