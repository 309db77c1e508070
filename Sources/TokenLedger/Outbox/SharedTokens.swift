public import TokenModel

extension Outbox {
    /// The provider tokens that daemons share and that may still be of use.
    public func sharedTokens(
        on connection: inout Connection
    ) throws(DatabaseError) -> [SharedProviderToken.Key: SharedProviderToken] {
        let tokens = try connection.query(
            """
            SELECT p.team_id, p.key_id, p.issued_at, p.sealed FROM tokenkeeper.provider_token AS p
            WHERE p.issued_at > clock_timestamp() - interval '1 hour'
            """
        ).decode { row throws(DatabaseError) in
            SharedProviderToken(
                key: .init(teamID: try row.read(), keyID: try row.read()), issuedAt: try row.read(),
                sealed: try row.read())
        }
        return Dictionary(uniqueKeysWithValues: tokens.map { ($0.key, $0) })
    }

    /// Shares a token, unless a newer one of the same key is shared. One from a clock that is ahead is not newer.
    public func share(_ token: SharedProviderToken, on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query(
            """
            INSERT INTO tokenkeeper.provider_token AS p (team_id, key_id, issued_at, sealed) VALUES ($1, $2, $3, $4)
            ON CONFLICT (team_id, key_id) DO UPDATE SET issued_at = excluded.issued_at, sealed = excluded.sealed
            WHERE p.issued_at < excluded.issued_at OR p.issued_at > clock_timestamp() + interval '5 minutes'
            """, [.text(token.key.teamID), .text(token.key.keyID), .instant(token.issuedAt), .text(token.sealed)])
    }
}
