internal import TokenModel

/// One of the shards, over a connection of its own.
struct ShardDatabase: ~Copyable {
    private let number: Int
    private let shards: ShardCount
    private var connection: Connection

    /// Connects, and checks that the schema is the one of this binary.
    init(_ number: Int, in map: ShardMap, user: String?, daemon: Version) throws(ShardError) {
        self.number = number
        shards = map.count
        connection = try Self.connect(to: number, in: map, user: user, daemon: daemon)
    }

    private static func connect(
        to number: Int, in map: ShardMap, user: String?, daemon: Version
    ) throws(ShardError) -> Connection {
        do {
            var connection = try Connection(to: try map.address(of: number, user: user))
            try Migrator(daemon: daemon).check(&connection)
            return connection
        } catch {
            throw ShardError.shard(number, "\(error)")
        }
    }

    /// Checks that the database is this shard.
    ///
    /// - Returns: False if it is not sharded yet.
    mutating func checkNumber() throws -> Bool {
        let found = try wrapping { connection throws(DatabaseError) in
            try connection.query("SELECT s.number, s.shards FROM tokenkeeper.shard AS s").decode {
                row throws(DatabaseError) in (try row.read(Int.self), try row.read(Int.self))
            }
        }
        guard let (foundNumber, foundShards) = found.first else { return false }
        if (foundNumber, foundShards) != (number, shards.number) {
            throw ShardError.otherNumber(
                shard: number, of: shards.number, isShard: foundNumber, ofShards: foundShards)
        }
        return true
    }

    /// Makes the database this shard, unless it is that already. Takes the rights of the schema's owner.
    mutating func takeNumber() throws {
        if try checkNumber() { return }
        let (number, shards) = (number, shards.number)
        let isTaken = try wrapping { connection throws(DatabaseError) in
            try connection.query(
                """
                INSERT INTO tokenkeeper.shard (number, shards)
                SELECT $1, $2 WHERE NOT EXISTS (
                    SELECT FROM tokenkeeper.ledger AS l WHERE tokenkeeper.shard_of(encode(l.token_key, 'hex'), $2) <> $1)
                """, [.int4(Int32(number)), .int4(Int32(shards))]
            ).affected == 1
        }
        if !isTaken { throw ShardError.hasOtherTokens(shard: number, of: shards) }
    }

    /// What a router copies: the functions and relations, with their comments and grants, as JSON.
    mutating func catalog() throws -> String {
        try wrapping { connection throws(DatabaseError) in
            try connection.run("BEGIN; SET LOCAL search_path = pg_catalog")
            defer { connection.rollback() }
            return try connection.query(Self.catalogSQL).one { row throws(DatabaseError) in try row.read(String.self) }
        }
    }

    /// The roles with a login that are members of one of our roles: login and role.
    mutating func logins() throws -> [LoginRole] {
        try wrapping { connection throws(DatabaseError) in try LoginRole.all(on: &connection) }
    }

    private mutating func wrapping<Answer>(
        _ work: (inout Connection) throws(DatabaseError) -> Answer
    ) throws(ShardError) -> Answer {
        do {
            return try work(&connection)
        } catch {
            throw ShardError.shard(number, error.description)
        }
    }

    private static let catalogSQL = """

                    SELECT pg_catalog.jsonb_build_object(
                        'relations', (
                            SELECT jsonb_object_agg(c.relname, jsonb_build_object(
                                'comment', obj_description(c.oid, 'pg_class'),
                                'columns', (
                                    SELECT jsonb_agg(jsonb_build_object(
                                        'name', a.attname, 'type', format_type(a.atttypid, a.atttypmod),
                                        'collation', CASE WHEN a.attcollation <> t.typcollation THEN format('COLLATE %I.%I', n.nspname, l.collname) END,
                                        'comment', col_description(c.oid, a.attnum)) ORDER BY a.attnum)
                                    FROM pg_catalog.pg_attribute AS a
                                    JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
                                    LEFT JOIN pg_catalog.pg_collation AS l ON l.oid = a.attcollation
                                    LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = l.collnamespace
                                    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
                                'readers', (
                                    SELECT jsonb_agg(DISTINCT g.grantee::regrole::text) FROM aclexplode(c.relacl) AS g
                                    WHERE g.privilege_type = 'SELECT' AND g.grantee <> c.relowner AND g.grantee <> 0)))
                            FROM pg_catalog.pg_class AS c WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p', 'v')),
                        'functions', (
                            SELECT jsonb_agg(jsonb_build_object(
                                'name', p.proname, 'arguments', pg_get_function_arguments(p.oid), 'result', pg_get_function_result(p.oid),
                                'types', (SELECT coalesce(string_agg(format_type(x.type, NULL), ', ' ORDER BY x.place), '')
                                          FROM unnest(p.proargtypes) WITH ORDINALITY AS x (type, place)),
                                'names', to_jsonb(coalesce(p.proargnames[1:p.pronargs], '{}')),
                                'definition', CASE WHEN p.provolatile <> 'v' AND NOT p.prosecdef THEN pg_get_functiondef(p.oid) END,
                                'comment', obj_description(p.oid, 'pg_proc'),
                                'callers', (SELECT jsonb_agg(DISTINCT g.grantee::regrole::text) FROM aclexplode(p.proacl) AS g
                                            WHERE g.grantee <> p.proowner AND g.grantee <> 0)) ORDER BY p.proname, p.proargtypes)
                            FROM pg_catalog.pg_proc AS p
                            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND p.prokind = 'f' AND p.prorettype <> 'trigger'::regtype))::text
        """
}

/// A login, and one of our roles that it is a member of.
struct LoginRole: Hashable, Comparable {
    let login: String
    let role: String

    static func < (left: LoginRole, right: LoginRole) -> Bool {
        (left.login, left.role) < (right.login, right.role)
    }

    /// All of a server, except superusers.
    static func all(on connection: inout Connection) throws(DatabaseError) -> [LoginRole] {
        try connection.query(
            """
            SELECT l.rolname::text, g.rolname::text FROM pg_catalog.pg_roles AS l, pg_catalog.pg_roles AS g
            WHERE l.rolcanlogin AND NOT l.rolsuper AND g.rolname = ANY ($1) AND pg_catalog.pg_has_role(l.oid, g.oid, 'MEMBER')
            """, [.texts(Grants.roles)]
        ).decode { row throws(DatabaseError) in LoginRole(login: try row.read(), role: try row.read()) }
    }
}
