import Synchronization
public import TokenModel

/// Start here: the JSON Web Token that a provider sends with each request. It is signed by a `SigningKey` on demand, and reused
/// while it is young. The alternative to a provider token is a `ClientCertificate`.
///
/// Apple, "Establishing a token-based connection to APNs": APNs refuses a token whose `iat` is more than an hour ago (403
/// `ExpiredProviderToken`), and a new token within 20 minutes of the last one (429 `TooManyProviderTokenUpdates`).
///
/// Two clocks decide. `uptime`, which nobody sets, measures a token's age, so that two tokens are never made within 20 minutes,
/// whatever happens to the time of day. `iat` is a time of day, and APNs compares it with its own clock. So a new token is due
///
/// - when the token is `reusedFor` old by either clock. `uptime` works even if the time of day is set back again and again. The
///   time of day reveals that a slow clock has been set forward: a slow clock's `iat` becomes too old for APNs early;
/// - when `iat` is ahead of the time of day by more than `toleratedLead`: the clock was fast and has been corrected.
///
/// A store keeps the token for the next process: a new one would be refused if the last one is younger than 20 minutes. A kept token
/// is used if this key has signed it, and if its age, by the time of day, is at least zero (minus `toleratedLead`) and less than
/// `reusedFor`. Before a token is made, the store is asked: another process may have made one.
///
/// If a clock was wrong, APNs refuses the token (403 `ExpiredProviderToken`). Once the clock has been set, the next refusal leads to a new token at once.
///
/// Daemons that send with one key share its token, so that one can take over from another, and APNs sees few new ones. Each offers the others its token
/// once APNs has accepted it, and takes what they offer if that is newer than its own, or if its own is not accepted. So all soon have the same one. One who
/// has taken a token uses it for some minutes longer than its maker, who makes the next one; or else the first who is due does.
public final class ProviderToken: Sendable {
    /// 20 minutes: Apple's minimum between two tokens.
    public static let leastAge = Duration.seconds(20 * 60)
    /// 58 minutes: Apple's hour, minus a margin for the time of a request and the difference between two clocks.
    public static let greatestAge = Duration.seconds(58 * 60)
    /// A token of another daemon is used for so many seconds longer than one of our own: each daemon for another time, or all would make the next one at once.
    static let takenFor: ClosedRange<Int64> = 60...300
    /// Five minutes: APNs has accepted a token of another daemon, so it is our clock that may be slow.
    static let sharedLead: Int64 = 300_000_000
    /// One minute: the time of day may be set back this far without a new token.
    static let toleratedLead: Int64 = 60_000_000

    private let jwt: ProviderJWT
    private let store: (any ProviderTokenStore)?
    private let reusedFor: Duration
    private let uptime: @Sendable () -> Duration
    private let state = Mutex(State())

    private struct State {
        var made: Made?
        /// The last tokens that this process has replaced. It takes none of them again.
        var left: [String] = []
        /// What another daemon has offered last, if there is nothing more to decide about it.
        var judged = ""
        /// Whether the store lacks the current token.
        var isToKeep = false

        mutating func replace(by next: Made) {
            if let made { left = left.suffix(7) + [made.text] }
            made = next
        }
    }

    /// The current token.
    private struct Made {
        var text: String
        /// By the time of day.
        var issuedAt: Instant
        /// By `uptime`.
        var madeAt: Duration
        var usedFor: Duration
        var isAccepted = false
    }

    /// - Parameters:
    ///   - keyID: Apple's identifier of the key, ten characters from A to Z and 0 to 9. The key file's name contains it.
    ///   - teamID: The identifier of the developer team, ten characters of the same kind.
    ///   - store: Where the token is kept; nil if it ends with the process.
    ///   - reusedFor: How long a token is used: 20 to 58 minutes.
    ///   - uptime: A clock that is never set, counted from any instant, including the time that the machine sleeps. Only tests
    ///     replace it.
    /// - Throws: If a parameter is not as described.
    public init(
        key: SigningKey, keyID: String, teamID: String, store: (any ProviderTokenStore)? = nil,
        reusedFor: Duration = .seconds(50 * 60),
        uptime: @escaping @Sendable () -> Duration = ProviderToken.uptime
    ) throws(CredentialError) {
        try Self.check(keyID, "key id", source: "it is in the name of the AuthKey_….p8 file")
        try Self.check(teamID, "team id", source: "Apple's developer site shows it under membership")
        guard Self.leastAge...Self.greatestAge ~= reusedFor else {
            throw CredentialError(
                "a provider token would be used for \(reusedFor.components.seconds) seconds, expected 1200 to 3480 "
                    + "(20 to 58 minutes), as Apple requires")
        }
        jwt = ProviderJWT(key: key, keyID: keyID, teamID: teamID)
        self.store = store
        self.reusedFor = reusedFor
        self.uptime = uptime
    }

    /// The token to send now, without `bearer `. Call it from any thread.
    ///
    /// - Parameter now: The time of day.
    /// - Throws: If it cannot be signed.
    public func text(at now: Instant) throws(CredentialError) -> String {
        try state.withLock { state throws(CredentialError) in
            if let made = state.made, !isDue(made, at: now) { return made.text }
            return try replace(&state, at: now).text
        }
    }

    /// Replaces the token after a 403 `ExpiredProviderToken`.
    ///
    /// - Parameters:
    ///   - now: The time of day.
    ///   - refused: The token that was refused.
    /// - Returns: Whether `text(at:)` now returns another token than `refused`; true as well if the token had already been
    ///   replaced. False if the refused token is younger than 20 minutes, unless the clock has been set since: then either the clock or the
    ///   refusal is wrong, and APNs would respond to another token with 429 `TooManyProviderTokenUpdates`.
    /// - Throws: If it cannot be signed.
    public func renew(at now: Instant, refused: String) throws(CredentialError) -> Bool {
        try state.withLock { state throws(CredentialError) in
            if let made = state.made {
                if made.text != refused { return true }
                if age(of: made) < Self.leastAge, !clockWasSet(since: made, now) { return false }
            }
            _ = try replace(&state, at: now, refused: refused)
            return true
        }
    }

    // MARK: - Other daemons

    /// Whether APNs has not accepted the current token yet.
    public var awaitsProof: Bool { state.withLock { $0.made?.isAccepted == false } }

    /// APNs has accepted a token, or has refused it because it knows another one.
    public func was(accepted isAccepted: Bool, _ text: String) {
        state.withLock { state in
            if state.made?.text == text { state.made?.isAccepted = isAccepted }
        }
    }

    /// The current token, if APNs has accepted it, and other daemons do not have it.
    ///
    /// - Parameter other: The one that they have.
    public func toShare(insteadOf other: SharedProviderToken?, at now: Instant) -> SharedProviderToken? {
        state.withLock { state in
            guard let made = state.made, made.isAccepted, !isDue(made, at: now),
                other.map({ $0.issuedAt < made.issuedAt }) ?? true,
                let sealed = ErrorQueue.confined({ jwt.key.seal?.sealed(made.text, of: name) })
            else { return nil }
            return SharedProviderToken(key: key, issuedAt: made.issuedAt, sealed: sealed)
        }
    }

    /// Takes a token that APNs has accepted from another daemon, unless the current one was accepted, too, and is newer. Does nothing with one that this key
    /// has not signed and sealed, that is due to be replaced, or that this process has replaced before.
    public func take(_ shared: SharedProviderToken, at now: Instant) {
        guard shared.key == key else { return }
        state.withLock { state in
            if let made = state.made, made.isAccepted, shared.issuedAt < made.issuedAt || shared.sealed == state.judged
            {
                return
            }
            guard let text = ErrorQueue.confined({ jwt.key.seal?.opened(shared.sealed, of: name) }),
                text != state.made?.text, !state.left.contains(text)
            else {
                state.judged = shared.sealed
                return
            }
            guard var taken = taken(text, at: now, lead: Self.sharedLead) else { return }
            state.judged = shared.sealed
            if let made = state.made, made.isAccepted, taken.issuedAt < made.issuedAt { return }
            taken.usedFor = min(reusedFor + .seconds(Int64.random(in: Self.takenFor)), Self.greatestAge)
            taken.isAccepted = true
            state.replace(by: taken)
            state.isToKeep = true
        }
    }

    /// Keeps a token that was taken, for the next process and for daemons of other databases. Apart from `take`: a file may take long.
    public func keep() {
        let taken = state.withLock { state in
            defer { state.isToKeep = false }
            return state.isToKeep ? state.made : nil
        }
        guard let taken, let store else { return }
        try? store.replace { kept in
            // That of a daemon of another database may be newer.
            if let kept, let seconds = jwt.issuedAt(of: kept), seconds > taken.issuedAt.microseconds / 1_000_000 {
                return kept
            }
            return taken.text
        }
    }

    public var key: SharedProviderToken.Key { .init(teamID: jwt.teamID, keyID: jwt.keyID) }

    private var name: String { "\(jwt.teamID)/\(jwt.keyID)" }

    /// The time since the first call, including the time that the machine sleeps.
    @Sendable public static func uptime() -> Duration {
        origin.duration(to: ContinuousClock.now)
    }

    private static let origin = ContinuousClock.now

    private func age(of made: Made) -> Duration { uptime() - made.madeAt }

    /// Whether the clock has been set since a token was made: then its `iat` was wrong.
    private func clockWasSet(since made: Made, _ now: Instant) -> Bool {
        let (elapsed, overflow) = now.microseconds.subtractingReportingOverflow(made.issuedAt.microseconds)
        let (shift, isFar) = elapsed.subtractingReportingOverflow(age(of: made).microseconds)
        return overflow || isFar || !(-Self.toleratedLead...Self.toleratedLead ~= shift)
    }

    private func isDue(_ made: Made, at now: Instant) -> Bool {
        let age = age(of: made)
        if age < Self.leastAge { return false }
        let (ageByTheDay, overflow) = now.microseconds.subtractingReportingOverflow(made.issuedAt.microseconds)
        return overflow || age >= made.usedFor || .microseconds(ageByTheDay) >= made.usedFor
            || ageByTheDay < -Self.toleratedLead
    }

    /// Takes the kept token if it is another one and young enough, or makes one.
    private func replace(
        _ state: inout State, at now: Instant, refused: String? = nil
    ) throws(CredentialError) -> Made {
        var next: Made?
        let made = state.made
        try store?.replace { kept throws(CredentialError) in
            if let kept, kept != made?.text, kept != refused { next = taken(kept, at: now, lead: Self.toleratedLead) }
            let chosen = if let next { next } else { try make(at: now) }
            next = chosen
            return chosen.text
        }
        let chosen = if let next { next } else { try make(at: now) }
        state.replace(by: chosen)
        return chosen
    }

    private func make(at now: Instant) throws(CredentialError) -> Made {
        let seconds = now.microseconds / 1_000_000
        let text = try jwt.text(issuedAt: seconds)
        return Made(
            text: text, issuedAt: Instant(microseconds: seconds * 1_000_000), madeAt: uptime(), usedFor: reusedFor)
    }

    /// A token of another process; nil if it is not to be used.
    private func taken(_ kept: String, at now: Instant, lead: Int64) -> Made? {
        guard let seconds = jwt.issuedAt(of: kept) else { return nil }
        let (microseconds, isNoInstant) = seconds.multipliedReportingOverflow(by: 1_000_000)
        let (age, isNoAge) = now.microseconds.subtractingReportingOverflow(microseconds)
        guard !isNoInstant, !isNoAge, age >= -lead, .microseconds(age) < reusedFor else { return nil }
        return Made(
            text: kept, issuedAt: Instant(microseconds: microseconds), madeAt: uptime() - .microseconds(max(age, 0)),
            usedFor: reusedFor)
    }

    private static func check(_ identifier: String, _ name: String, source: String) throws(CredentialError) {
        let isRight = identifier.utf8.allSatisfy {
            UInt8(ascii: "A")...UInt8(ascii: "Z") ~= $0 || UInt8(ascii: "0")...UInt8(ascii: "9") ~= $0
        }
        guard isRight, identifier.utf8.count == 10 else {
            // The text may be a misplaced secret, so the message does not show it.
            throw CredentialError(
                "the \(name) has \(identifier.count) characters\(isRight ? "" : ", some other than A to Z and 0 to 9"), "
                    + "expected 10 of A to Z and 0 to 9: \(source)")
        }
    }
}

extension ProviderToken: CustomStringConvertible {
    public var description: String { "a provider token of the key \(jwt.keyID) of the team \(jwt.teamID)" }
}
