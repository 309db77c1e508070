public import TokenModel

extension Outbox {
    /// The provider tokens that daemons share and that may be of use: not those of an hour ago, or of a clock that is ahead.
    public static func sharedTokens(
        on connection: inout Connection
    ) throws(DatabaseError) -> [SharedProviderToken.Key: SharedProviderToken] {
        let tokens = try connection.query(
            """
            SELECT p.team_id, p.key_id, p.issued_at, p.sealed FROM tokenkeeper.provider_token AS p
            WHERE p.issued_at BETWEEN clock_timestamp() - interval '1 hour' AND clock_timestamp() + interval '5 minutes'
            """
        ).decode { row throws(DatabaseError) in
            SharedProviderToken(
                key: .init(teamID: try row.read(), keyID: try row.read()), issuedAt: try row.read(),
                sealed: try row.read())
        }
        return Dictionary(tokens.map { ($0.key, $0) }) { $1 }
    }

    /// Shares tokens, unless a newer one of the same key is shared. One of a clock that is more than five minutes ahead is not newer.
    func share(_ tokens: [SharedProviderToken], on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query(
            """
            INSERT INTO tokenkeeper.provider_token AS p (team_id, key_id, issued_at, sealed)
            SELECT n.team_id, n.key_id, n.issued_at, n.sealed
            FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::text[]) AS n (team_id, key_id, issued_at, sealed)
            -- Daemons lock the rows in one order.
            ORDER BY n.team_id, n.key_id
            ON CONFLICT (team_id, key_id) DO UPDATE SET issued_at = excluded.issued_at, sealed = excluded.sealed
            WHERE p.issued_at < excluded.issued_at OR p.issued_at > clock_timestamp() + interval '5 minutes'
            """,
            [
                .texts(tokens.map(\.key.teamID)), .texts(tokens.map(\.key.keyID)), .instants(tokens.map(\.issuedAt)),
                .texts(tokens.map(\.sealed)),
            ])
    }

    /// Reads what daemons share, and shares more, in one transaction.
    ///
    /// - Parameter choose: Takes what is shared; returns what this daemon has to share.
    public func exchangeTokens(
        on connection: inout Connection,
        _ choose: ([SharedProviderToken.Key: SharedProviderToken]) -> [SharedProviderToken]
    ) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            let mine = choose(try Self.sharedTokens(on: &connection))
            if !mine.isEmpty { try share(mine, on: &connection) }
        }
    }
}
