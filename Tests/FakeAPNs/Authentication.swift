import Synchronization

/// What was found out about JWTs, for all connections: each text is verified once.
final class VerifiedTokens: Sendable {
    private let keys: [FakeSigningKey]
    private let state = Mutex(State())

    private struct State {
        var verified: [String: ProviderToken?] = [:]
        var updates = TokenUpdateHistory()
    }

    init(keys: [FakeSigningKey]) {
        self.keys = keys
    }

    func verified(_ text: String) -> ProviderToken? {
        state.withLock { state in
            if let known = state.verified[text] { return known }
            // A client that makes a JWT a request must not fill the memory.
            if state.verified.count >= 10_000 { state.verified.removeAll() }
            let token = ProviderToken(text, keys: keys)
            state.verified[text] = .some(token)
            return token
        }
    }

    func isUpdateTooEarly(_ text: String, of key: String, at now: Int64) -> Bool {
        state.withLock { $0.updates.isTooEarly(text, of: key, at: now) }
    }
}

/// When which JWT of a key was first seen.
struct TokenUpdateHistory {
    private var latest: [String: (since: Int64, texts: Set<String>)] = [:]

    /// Whether this is a new JWT within 20 minutes of the one before. If not, it counts from now on.
    mutating func isTooEarly(_ text: String, of key: String, at now: Int64) -> Bool {
        guard var known = latest[key] else {
            latest[key] = (now, [text])
            return false
        }
        if known.texts.contains(text) { return false }
        if now - known.since < 20 * 60_000 { return true }
        known.texts.insert(text)
        known.since = now
        latest[key] = known
        return false
    }
}

/// Who speaks on one connection: decided for each request, remembered where it costs.
struct Authentication {
    private let ledger: VerifiedTokens
    private let isRequired: Bool
    private let updates: FakeOptions.TokenUpdates
    private let certificate: PeerCertificate
    private var history = TokenUpdateHistory()
    /// The `authorization` seen last, which most often comes again: then it is the same text at the same address.
    private var last: (header: String, token: ProviderToken)?
    private var team: String?

    init(ledger: VerifiedTokens, options: FakeOptions, certificate: PeerCertificate) {
        self.ledger = ledger
        isRequired = options.requiresProviderToken
        updates = options.tokenUpdates
        self.certificate = certificate
    }

    /// Nil: it may send.
    mutating func refusal(_ header: String?, at now: Int64) -> Refusal? {
        switch certificate {
        case .trusted: return nil
        case .untrusted: return .badCertificate
        case .none: break
        }
        guard isRequired else { return nil }
        if let last, last.header == header { return last.token.isFresh(at: now) ? nil : .expiredProviderToken }
        guard let header else { return .missingProviderToken }
        guard let text = Self.bearer(header) else { return .missingProviderToken }
        guard let token = ledger.verified(text) else { return .invalidProviderToken }
        guard token.isFresh(at: now) else { return .expiredProviderToken }
        // One team a connection.
        if let team, team != token.team { return .invalidProviderToken }
        switch updates {
        case .unlimited: break
        case .every20MinutesPerConnection:
            if history.isTooEarly(text, of: token.key, at: now) { return .tooManyProviderTokenUpdates }
        case .every20MinutesPerServer:
            if ledger.isUpdateTooEarly(text, of: token.key, at: now) { return .tooManyProviderTokenUpdates }
        }
        team = token.team
        last = (header, token)
        return nil
    }

    /// What follows `bearer `; nil when there is nothing.
    static func bearer(_ header: String) -> String? {
        guard header.utf8.count > 7, header.prefix(7).lowercased() == "bearer " else { return nil }
        return String(header.dropFirst(7))
    }
}
