/// What makes a database a router: a foreign server of PL/Proxy with the databases of the map, and the functions of `migrations/router/router.sql`.
public struct RouterScript: Equatable, Sendable {
    static let file = "router/router.sql"

    /// The groups of functions. Each belongs to a role `tokenkeeper_router_GROUP`, for which the databases have a login of this name.
    static let groups = ["app", "sender", "reader"]

    private let names: [String]
    /// libpq's options of each database.
    private let addresses: [String: [String: String]]
    private let topics: [String: String]
    private let split: [String]
    private let owners: [String]

    /// - Parameters:
    ///   - databases: Connection strings by name.
    ///   - topics: The database of each topic that does not follow its bucket.
    ///   - split: The topics that are split by device.
    ///   - owners: The database of each bucket.
    /// - Throws: If a connection string is none.
    public init(
        databases: [String: String], topics: [String: String], split: [String], owners: [String]
    ) throws(DatabaseError) {
        names = databases.keys.sorted()
        var addresses: [String: [String: String]] = [:]
        for (name, text) in databases { addresses[name] = try DatabaseAddress(text).options }
        self.addresses = addresses
        self.topics = topics
        self.split = split.sorted()
        self.owners = owners
    }

    /// The statements, for one transaction of a superuser. Everything is made anew; what others have built on it is an error.
    public var text: String {
        """
        CREATE EXTENSION IF NOT EXISTS plproxy;
        \(Self.removal)
        DROP SERVER IF EXISTS tokenkeeper CASCADE;
        CREATE SCHEMA IF NOT EXISTS tokenkeeper;
        COMMENT ON SCHEMA tokenkeeper IS 'A router: its functions run in the databases of tokenkeeperd. tokenkeeperd router makes it anew from the map.';
        CREATE SERVER tokenkeeper FOREIGN DATA WRAPPER plproxy OPTIONS (\(options));
        \(Self.roles)
        \(functions)
        """
    }

    /// Removes the functions and types of the last time. All at once, because they use each other.
    private static let removal = """
        DO $$
        DECLARE
            gone text;
        BEGIN
            IF EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = to_regnamespace('tokenkeeper') AND c.relkind IN ('r', 'p')) THEN
                RAISE EXCEPTION 'this database has a ledger, and cannot be a router' USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            SELECT string_agg(p.oid::regprocedure::text, ', ') INTO gone FROM pg_proc AS p WHERE p.pronamespace = to_regnamespace('tokenkeeper');
            IF gone IS NOT NULL THEN
                EXECUTE 'DROP FUNCTION ' || gone;
            END IF;
            SELECT string_agg(t.oid::regtype::text, ', ') INTO gone FROM pg_type AS t JOIN pg_class AS c ON c.oid = t.typrelid
            WHERE t.typnamespace = to_regnamespace('tokenkeeper') AND c.relkind = 'c';
            IF gone IS NOT NULL THEN
                EXECUTE 'DROP TYPE ' || gone;
            END IF;
        END
        $$;
        """

    /// A host that is gone must not hold a session for the two hours of the system's defaults. What the map says wins.
    private static let patience = [
        "connect_timeout": "3", "tcp_user_timeout": "10000", "keepalives_idle": "10", "keepalives_interval": "5",
        "keepalives_count": "3",
    ]

    private var options: String {
        let partitions = names.enumerated().map { number, name in
            var address = Self.patience.merging(addresses[name] ?? [:]) { $1 }
            // The user is that of the function's group, and not the one with whom people connect.
            address["user"] = nil
            // Its answers name it.
            address["options"] = [address["options"], "-c tokenkeeper.database=\(name)"].compactMap(\.self).joined(
                separator: " ")
            let words = address.sorted { $0.key < $1.key }.map { "\($0.key)=\(Self.quoted($0.value))" }
            return "p\(number) \(SQLLiteral.quoted(words.joined(separator: " ")))"
        }
        return (partitions + ["modular_mapping '1'"]).joined(separator: ", ")
    }

    /// A value of a connection string.
    private static func quoted(_ value: String) -> String {
        "'" + value.replacing("\\", with: "\\\\").replacing("'", with: "\\'") + "'"
    }

    private static var roles: String {
        groups.flatMap { group in
            ["tokenkeeper_router_\(group)", "tokenkeeper_\(group)"].map {
                "DO $$ BEGIN IF to_regrole('\($0)') IS NULL THEN CREATE ROLE \($0) NOLOGIN; END IF; END $$;"
            } + [
                "CREATE USER MAPPING FOR tokenkeeper_router_\(group) SERVER tokenkeeper OPTIONS (user 'tokenkeeper_router_\(group)');",
                "GRANT USAGE ON FOREIGN SERVER tokenkeeper TO tokenkeeper_router_\(group);",
                "GRANT USAGE, CREATE ON SCHEMA tokenkeeper TO tokenkeeper_router_\(group);",
            ]
        }.joined(separator: "\n")
    }

    private var functions: String {
        let numbers = Dictionary(uniqueKeysWithValues: names.enumerated().map { ($1, $0) })
        let own = topics.keys.sorted()
        let values = [
            "{topics}": Self.array(own, "text"), "{split}": Self.array(split, "text"),
            "{places}": Self.array(own.map { String(numbers[topics[$0] ?? ""] ?? 0) }, "integer"),
            "{owners}": Self.array(owners.map { String(numbers[$0] ?? 0) }, "smallint"),
        ]
        return values.reduce(SchemaFiles.embeddedTexts[Self.file] ?? "") { text, value in
            text.replacing(value.key, with: value.value)
        }
    }

    private static func array(_ elements: [String], _ type: String) -> String {
        let quoted = elements.map { "\"" + $0.replacing("\\", with: "\\\\").replacing("\"", with: "\\\"") + "\"" }
        return SQLLiteral.quoted("{" + quoted.joined(separator: ",") + "}") + "::\(type)[]"
    }
}
