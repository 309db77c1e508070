public import TokenModel

/// Where the shards are: a connection string for each, in the order of their numbers.
///
/// Start here: `Router` makes a router from this, `ShardDatabase` is one of the shards.
public struct ShardMap: Sendable, Equatable {
    public let count: ShardCount
    /// What the strings say, by libpq's keywords: neither a user nor a password.
    let options: [[String: String]]

    /// - Parameter connections: libpq connection strings, `host=… dbname=…` or URLs.
    /// - Throws: What is wrong; never a string itself, which may contain a password.
    public init(_ connections: [String]) throws(ShardError) {
        guard let count = ShardCount(connections.count) else {
            throw ShardError.map("it has \(connections.count) shards, expected a power of two from 1 to 1024")
        }
        self.count = count
        var options: [[String: String]] = []
        for (number, text) in connections.enumerated() {
            let named: [String: String]
            do {
                named = try DatabaseAddress(text).options
            } catch {
                throw ShardError.map("shard \(number): \(error.message)")
            }
            if named["password"] != nil || named["sslpassword"] != nil {
                throw ShardError.map(
                    "shard \(number): a password in the map can be read by everybody who can read the router's catalog: put it into the password file of the system user that runs the router's PostgreSQL"
                )
            }
            if named["user"] != nil {
                throw ShardError.map(
                    "shard \(number): a user in the map, expected none: each login connects to the shards under its own name"
                )
            }
            guard named["dbname"] != nil || named["service"] != nil else {
                throw ShardError.map("shard \(number): no database, expected dbname=…")
            }
            if let other = options.firstIndex(of: named) {
                throw ShardError.map("shard \(number) is the same database as shard \(other)")
            }
            options.append(named)
        }
        self.options = options
    }

    /// - Parameters:
    ///   - user: The role to connect as; nil for libpq's default.
    ///   - password: Nil for libpq's password file, or none.
    func address(
        of number: Int, user: String? = nil, password: String? = nil
    ) throws(DatabaseError) -> DatabaseAddress {
        var named = options[number]
        named["user"] = user
        named["password"] = password
        return try DatabaseAddress(Self.text(named))
    }

    /// How a daemon connects to this shard.
    ///
    /// - Parameter own: How it connects to its own database: as the same user, and with the same password file.
    func address(of number: Int, as own: DatabaseAddress) throws(DatabaseError) -> DatabaseAddress {
        var address = try address(of: number, user: own.options["user"])
        address.passwordFile = own.passwordFile
        return address
    }

    /// For PL/Proxy: a string with each option once, in a fixed order.
    func connection(of number: Int) -> String { Self.text(forBackend(number)) }

    /// What a backend of the router passes to libpq. A server that is gone without a word must not block callers for minutes.
    func forBackend(_ number: Int) -> [String: String] {
        ["connect_timeout": "10", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"]
            .merging(options[number]) { $1 }
    }

    private static func text(_ options: [String: String]) -> String {
        options.sorted { $0.key < $1.key }.map { keyword, value in
            let escaped = value.flatMap { $0 == "'" || $0 == "\\" ? ["\\", $0] : [$0] }
            return "\(keyword)='\(String(escaped))'"
        }.joined(separator: " ")
    }
}
