internal import TokenModel

/// A database without data of its own, whose schema `tokenkeeper` leads to all shards. `migrations/router` has its SQL.
public struct Router {
    let map: ShardMap
    /// The role to connect to the shards as; nil for libpq's default.
    let shardUser: String?
    let daemon: Version

    public init(to map: ShardMap, shardUser: String? = nil, daemon: Version) {
        self.map = map
        self.shardUser = shardUser
        self.daemon = daemon
    }

    /// Tells each shard its number, and creates or renews the router's schema in one transaction. Can be repeated.
    ///
    /// The role needs the rights of the schema's owner on a shard that does not know its number, and must be a superuser on the router.
    ///
    /// - Returns: False if there was nothing to do.
    /// - Throws: `ShardError` before anything is changed, or `DatabaseError`.
    public func migrate(_ router: inout Connection) throws -> Bool {
        let whom = try SchemaOwner.whom(&router)
        guard whom.isSuperuser else { throw ShardError.notSuperuser(role: whom.role) }
        let script = try script()
        for number in 0..<map.count.number {
            var shard = try database(number)
            try shard.takeNumber()
        }
        let fingerprint = try fingerprint(of: script, on: &router)
        if try recorded(on: &router) == fingerprint { return false }
        try router.transaction(RouterScript.transaction, settings: RouterScript.settings) {
            connection throws(DatabaseError) in
            for statement in script.statements { try connection.run(statement) }
            try connection.run(script.record(fingerprint: fingerprint))
        }
        return true
    }

    /// What `migrate` would run on the router, for psql. Changes nothing, and does not ask whether it has been run.
    public func print(_ router: inout Connection) throws -> String {
        let script = try script()
        return script.text(fingerprint: try fingerprint(of: script, on: &router))
    }

    /// Compares the router and all shards.
    ///
    /// - Returns: What is wrong, a sentence each; empty if nothing is.
    public func check(_ router: inout Connection) throws -> [String] {
        var findings: [String] = []
        var script: RouterScript?
        let logins = try LoginRole.all(on: &router).sorted()
        for number in 0..<map.count.number {
            do {
                var shard = try database(number)
                if try !shard.checkNumber() {
                    findings.append("shard \(number): it does not know its number: run `tokenkeeperd router migrate`")
                }
                if script == nil { script = RouterScript(map: map, catalog: try shard.catalog(), release: daemon) }
                let there = Set(try shard.logins())
                for missing in logins where !there.contains(missing) {
                    findings.append(
                        "shard \(number): \(missing.login) is no login with the role \(missing.role), as it is on the router"
                    )
                }
            } catch let error as ShardError {
                findings.append(error.description)
            }
        }
        let found = try recorded(on: &router)
        if found == nil {
            findings.append("router: this database is none yet: run `tokenkeeperd router migrate`")
        } else if let script, try found != fingerprint(of: script, on: &router) {
            findings.append(
                "router: it was made from another map or by another release, or logins or the schemas of the shards have changed: run `tokenkeeperd router migrate`"
            )
        }
        return findings
    }

    /// Whether a database is a router.
    ///
    /// By name and not by to_regclass, which needs rights to the schema.
    public static func isOne(_ connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_views WHERE schemaname = 'tokenkeeper' AND viewname = 'router')"
        ).value()
    }

    /// For a command that reads and calls what shards and routers have by the same names.
    ///
    /// - Returns: False if the database is no router.
    /// - Throws: `ShardError.otherRelease` if another release has made the router.
    public static func isOne(_ connection: inout Connection, of release: Version) throws -> Bool {
        guard try isOne(&connection) else { return false }
        let found = try connection.query("SELECT r.release FROM tokenkeeper.router AS r").value(String.self)
        guard found == release.description else {
            throw ShardError.otherRelease(router: found, this: release.description)
        }
        return true
    }

    private func database(_ number: Int) throws(ShardError) -> ShardDatabase {
        try ShardDatabase(number, in: map, user: shardUser, daemon: daemon)
    }

    /// Reads shard 0, and checks first that all shards are what the map says.
    private func script() throws -> RouterScript {
        for number in 0..<map.count.number {
            var shard = try database(number)
            _ = try shard.checkNumber()
        }
        var first = try database(0)
        return RouterScript(map: map, catalog: try first.catalog(), release: daemon)
    }

    /// Which script was run, or nil.
    private func recorded(on router: inout Connection) throws(DatabaseError) -> String? {
        guard try Self.isOne(&router) else { return nil }
        return try router.query("SELECT r.fingerprint FROM tokenkeeper.router AS r").value(String.self)
    }

    /// A digest of what would be run, and of the logins for which it would be run.
    private func fingerprint(of script: RouterScript, on router: inout Connection) throws(DatabaseError) -> String {
        let logins = try LoginRole.all(on: &router).sorted().map { "\($0.login) \($0.role)" }
        return try router.query(
            "SELECT encode(sha256(convert_to($1, 'UTF8')), 'hex')",
            [.text(([script.release.description] + script.statements + logins).joined(separator: "\n"))]
        ).value()
    }
}
