internal import FoundationEssentials
internal import TokenModel

/// The SQL that makes a router: what `router migrate` runs, and `--print` prints.
struct RouterScript {
    let map: ShardMap
    /// Of one shard; they all have the same.
    let catalog: String
    let release: Version

    static let transaction = BatchTransaction(lockTimeout: .seconds(5), statementTimeout: .zero, isDurable: true)
    static let settings = "SET LOCAL search_path = pg_catalog; SET LOCAL standard_conforming_strings = on;"

    /// Everything but the record of what was run, in order.
    var statements: [String] {
        [
            """
            SELECT set_config('tokenkeeper.shard_map', \(SQLLiteral.quoted(mapText)), true),
                set_config('tokenkeeper.shard_catalog', \(SQLLiteral.quoted(catalog)), true);
            """
        ] + SchemaFiles.router.map(\.sql)
    }

    /// For psql: the whole transaction.
    func text(fingerprint: String) -> String {
        let begin = (Self.transaction.begin + Self.settings).split(separator: "\n").joined(separator: "\n")
        return
            (["-- tokenkeeperd \(release): run this with psql as a superuser.\n\\set ON_ERROR_STOP on", begin]
            + statements
            + [record(fingerprint: fingerprint), "COMMIT;"]).joined(separator: "\n\n") + "\n"
    }

    /// Says in the router what was run.
    ///
    /// - Parameter fingerprint: The digest of `statements`.
    func record(fingerprint: String) -> String {
        """
        CREATE OR REPLACE VIEW tokenkeeper.router AS
        SELECT \(SQLLiteral.quoted(release.description))::text AS release, \(map.count.number) AS shards,
            \(SQLLiteral.quoted(fingerprint))::text AS fingerprint;
        COMMENT ON VIEW tokenkeeper.router IS
            'One row: the tokenkeeperd whose `router migrate` made this router, how many shards it leads to, and a digest of what was run.';
        GRANT SELECT ON tokenkeeper.router TO \(Grants.roles.joined(separator: ", "));
        """
    }

    private var mapText: String {
        let entries = (0..<map.count.number).map { number in
            Entry(conninfo: map.connection(of: number), options: map.forBackend(number))
        }
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        // Texts only: this cannot fail.
        return ((try? encoder.encode(entries)).map { String(decoding: $0, as: UTF8.self) }) ?? ""
    }

    private struct Entry: Encodable {
        let conninfo: String
        let options: [String: String]
    }
}
