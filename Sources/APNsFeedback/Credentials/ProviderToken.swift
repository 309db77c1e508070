import FoundationEssentials
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
/// If a clock was wrong by half an hour or more, APNs may refuse the token for up to 20 minutes after the correction. It would refuse
/// a second token as well.
public final class ProviderToken: Sendable {
    /// 20 minutes: Apple's minimum between two tokens.
    public static let leastAge = Duration.seconds(20 * 60)
    /// 58 minutes: Apple's hour, minus a margin for the time of a request and the difference between two clocks.
    public static let greatestAge = Duration.seconds(58 * 60)
    /// One minute: the time of day may be set back this far without a new token.
    static let toleratedLead: Int64 = 60_000_000

    private let key: SigningKey
    private let keyID: String
    private let teamID: String
    private let reusedFor: Duration
    private let uptime: @Sendable () -> Duration
    private let current = Mutex<Made?>(nil)

    /// The current token.
    private struct Made {
        var text: String
        /// By the time of day.
        var issuedAt: Instant
        /// By `uptime`.
        var madeAt: Duration
    }

    /// - Parameters:
    ///   - keyID: Apple's identifier of the key, ten characters from A to Z and 0 to 9. The key file's name contains it.
    ///   - teamID: The identifier of the developer team, ten characters of the same kind.
    ///   - reusedFor: How long a token is used: 20 to 58 minutes.
    ///   - uptime: A clock that is never set, counted from any instant, including the time that the machine sleeps. Only tests
    ///     replace it.
    /// - Throws: If a parameter is not as described.
    public init(
        key: SigningKey, keyID: String, teamID: String, reusedFor: Duration = .seconds(50 * 60),
        uptime: @escaping @Sendable () -> Duration = ProviderToken.uptime
    ) throws(CredentialError) {
        try Self.check(keyID, "key id", source: "it is in the name of the AuthKey_….p8 file")
        try Self.check(teamID, "team id", source: "Apple's developer site shows it under membership")
        guard Self.leastAge...Self.greatestAge ~= reusedFor else {
            throw CredentialError(
                "a provider token would be used for \(reusedFor.components.seconds) seconds, expected 1200 to 3480 "
                    + "(20 to 58 minutes), as Apple requires")
        }
        self.key = key
        self.keyID = keyID
        self.teamID = teamID
        self.reusedFor = reusedFor
        self.uptime = uptime
    }

    /// The token to send now, without `bearer `. Call it from any thread.
    ///
    /// - Parameter now: The time of day.
    /// - Throws: If it cannot be signed.
    public func text(at now: Instant) throws(CredentialError) -> String {
        try current.withLock { made throws(CredentialError) in
            if let made, !isDue(made, at: now) { return made.text }
            return try make(at: now, in: &made)
        }
    }

    /// Makes a new token after a 403 `ExpiredProviderToken`.
    ///
    /// - Parameters:
    ///   - now: The time of day.
    ///   - refused: The token that was refused.
    /// - Returns: Whether `text(at:)` now returns another token than `refused`; true as well if the token had already been
    ///   replaced. False if the refused token is younger than 20 minutes: then either the clock or the refusal is wrong, and APNs
    ///   would respond to another token with 429 `TooManyProviderTokenUpdates`.
    /// - Throws: If it cannot be signed.
    public func renew(at now: Instant, refused: String) throws(CredentialError) -> Bool {
        try current.withLock { made throws(CredentialError) in
            if let made {
                if made.text != refused { return true }
                if age(of: made) < Self.leastAge { return false }
            }
            _ = try make(at: now, in: &made)
            return true
        }
    }

    /// The time since the first call, including the time that the machine sleeps.
    @Sendable public static func uptime() -> Duration {
        origin.duration(to: ContinuousClock.now)
    }

    private static let origin = ContinuousClock.now

    private func age(of made: Made) -> Duration { uptime() - made.madeAt }

    private func isDue(_ made: Made, at now: Instant) -> Bool {
        let age = age(of: made)
        if age < Self.leastAge { return false }
        let (ageByTheDay, overflow) = now.microseconds.subtractingReportingOverflow(made.issuedAt.microseconds)
        return overflow || age >= reusedFor || .microseconds(ageByTheDay) >= reusedFor
            || ageByTheDay < -Self.toleratedLead
    }

    private func make(at now: Instant, in made: inout Made?) throws(CredentialError) -> String {
        // Neither identifier has a character that JSON escapes. Apple accepts `iat` only as a number.
        let issuedAt = now.microseconds / 1_000_000
        let header = Self.base64URL(Array(#"{"alg":"ES256","kid":"\#(keyID)"}"#.utf8))
        let claims = Self.base64URL(Array(#"{"iss":"\#(teamID)","iat":\#(issuedAt)}"#.utf8))
        let signature = try key.sign(Array("\(header).\(claims)".utf8))
        let text = "\(header).\(claims).\(Self.base64URL(signature))"
        made = Made(text: text, issuedAt: now, madeAt: uptime())
        return text
    }

    /// RFC 4648, 5, without padding: RFC 7515, 2.
    private static func base64URL(_ bytes: [UInt8]) -> String {
        let text = Data(bytes).base64EncodedString().utf8.compactMap { character -> UInt8? in
            switch character {
            case UInt8(ascii: "+"): UInt8(ascii: "-")
            case UInt8(ascii: "/"): UInt8(ascii: "_")
            case UInt8(ascii: "="): nil
            default: character
            }
        }
        return String(decoding: text, as: UTF8.self)
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
    public var description: String { "a provider token of the key \(keyID) of the team \(teamID)" }
}
