internal import Glibc
internal import TokenLedger

extension Configuration {
    /// The package's user, as which systemd runs the service.
    private static let serviceUser = "tokenkeeperd"

    /// Connects as the service would: for root, who is usually no role of PostgreSQL, as the service's user. That works for peer
    /// authentication; it does nothing if a password is used, or if somebody names the database by hand.
    func connectLikeService(writes: Bool) throws(DatabaseError) -> Connection {
        let isNamedByHand = (values["database_url"]?.rank ?? .defaultValue) > .credential
        guard geteuid() == 0, address.passwordFile == nil, !isNamedByHand,
            let user = unsafe getpwnam(Self.serviceUser)?.pointee.pw_uid, seteuid(user) == 0
        else { return try Connection(to: address, writes: writes) }
        defer { _ = seteuid(0) }
        return try Connection(to: address, writes: writes)
    }
}
