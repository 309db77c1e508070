import Synchronization

/// The results of verifying JWTs, shared by all connections. Each text is verified once.
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
            // A client that makes a JWT for each request must not fill the memory.
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

/// When each key's JWT last changed.
struct TokenUpdateHistory {
    private var latest: [String: (since: Int64, texts: Set<String>)] = [:]

    /// Whether this is a new JWT within 20 minutes of the last one. If it is new and not too early, its 20 minutes begin now.
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

/// Authenticates the requests of one connection. Results that are expensive to compute are remembered.
struct Authentication {
    private let ledger: VerifiedTokens
    private let isRequired: Bool
    private let updates: FakeOptions.TokenUpdates
    private let certificate: PeerCertificate
    private var history = TokenUpdateHistory()
    /// The last `authorization`. Most requests have the same one as the request before, and strings that share storage compare fast.
    private var last: (header: String, token: ProviderToken)?
    private var team: String?

    init(ledger: VerifiedTokens, options: FakeOptions, certificate: PeerCertificate) {
        self.ledger = ledger
        isRequired = options.requiresProviderToken
        updates = options.tokenUpdates
        self.certificate = certificate
    }

    /// Nil if the request may be sent.
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
        // A connection belongs to one team.
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

    /// The text after `bearer `; nil if there is none.
    static func bearer(_ header: String) -> String? {
        guard header.utf8.count > 7, header.prefix(7).lowercased() == "bearer " else { return nil }
        return String(header.dropFirst(7))
    }
}
