internal import APNsFeedback
internal import Logging
internal import TokenLedger
internal import TokenModel

/// The provider tokens of all credentials, one for each signing key. Used while the credentials are loaded.
///
/// Credentials may share a key: one for each environment, for example. APNs refuses a new provider token within 20 minutes of the
/// last one (429 `TooManyProviderTokenUpdates`), so credentials with the same key share its token.
struct ProviderTokens {
    /// Where tokens are kept for the next start; nil if they end with the process.
    private let directory: String?
    private let logger: Logger?
    private var made: [(key: SigningKey, keyID: String, teamID: String, token: ProviderToken)] = []

    init(keptIn directory: String? = nil, logger: Logger? = nil) {
        self.directory = directory
        self.logger = logger
    }

    /// Takes those that daemons share in the database.
    static func take(_ shared: [SharedProviderToken.Key: SharedProviderToken], _ tokens: [ProviderToken]) {
        for token in tokens {
            if let other = shared[token.key] { token.take(other, at: .now) }
        }
    }

    /// The provider token of a key. Two keys under one identifier have two: one of them must be wrong, and only that one must fail.
    mutating func token(of key: SigningKey, keyID: String, teamID: String) throws -> ProviderToken {
        if let same = made.first(where: { $0.keyID == keyID && $0.teamID == teamID && $0.key.isSame(as: key) }) {
            return same.token
        }
        // The file is named after the identifiers, so only one of two such keys can have it.
        let isTaken = made.contains { $0.keyID == keyID && $0.teamID == teamID }
        let file =
            isTaken ? nil : directory.map { ProviderTokenFile(in: $0, keyID: keyID, teamID: teamID, logger: logger) }
        let token = try ProviderToken(key: key, keyID: keyID, teamID: teamID, store: file)
        made.append((key, keyID, teamID, token))
        return token
    }
}

/// What commands need that use a signing key beside the daemons.
extension Configuration {
    /// Takes the provider token of the daemons, or gives them one that APNs has accepted. Does nothing if PostgreSQL cannot be asked: then the
    /// token is a new one.
    func exchange(_ token: ProviderToken?) {
        guard let token, var connection = try? connectLikeService(writes: true) else { return }
        let outbox = Outbox(daemonID: "", processScope: "", lockTimeout: lockTimeout)
        try? outbox.exchangeTokens(on: &connection) { shared in
            ProviderTokens.take(shared, [token])
            return [token.toShare(insteadOf: shared[token.key], at: .now)].compactMap(\.self)
        }
    }

    /// APNs has accepted the token: without this, a daemon that starts now would make another one, and APNs refuses that for 20 minutes.
    func wasAccepted(_ token: ProviderToken?) {
        guard let token, token.awaitsProof, let text = try? token.text(at: .now) else { return }
        token.was(accepted: true, text)
        exchange(token)
    }
}
