internal import Glibc
internal import TokenLedger

extension Configuration {
    /// The package's user, as which systemd runs the service.
    private static let serviceUser = "tokenkeeperd"

    /// What to set, instead of libpq's error about a socket that nobody has named.
    static let noDatabase =
        "no database is named: set database_url in \(ConfigurationPlace.usual)/tokenkeeperd.toml, or use --database-url postgresql:///NAME"

    /// Connects as the service would: for root, who is usually no role of PostgreSQL, as the service's user. That works for peer
    /// authentication; it does nothing if a password is used, or if somebody names the database by hand.
    func connectLikeService(writes: Bool) throws(DatabaseError) -> Connection {
        if !address.isGiven { throw DatabaseError(.configuration, Self.noDatabase) }
        let isNamedByHand = (values["database_url"]?.rank ?? .defaultValue) > .credential
        guard geteuid() == 0, address.passwordFile == nil, !isNamedByHand,
            let user = unsafe getpwnam(Self.serviceUser)?.pointee.pw_uid, seteuid(user) == 0
        else { return try Connection(to: address, writes: writes) }
        defer { _ = seteuid(0) }
        return try Connection(to: address, writes: writes)
    }
}
