public import TokenModel

/// Start here: what each response of APNs means for its device token. Pure and total: every input has a verdict, and none throws.
///
/// `ResponseBody` reads the body, and `RetryPolicy` decides what the same response means for the request.
///
/// Statuses and reasons: Apple, "Handling notification responses from APNs".
public enum Interpretation {
    /// Whether APNs has sent this response. It sends `apns-id` with a 200, and a reason in JSON with an error; a reason that this version does not know
    /// is one word, and comes with `apns-id`, too. Anything else comes from a proxy, a gateway or a redirect, and says nothing about the token or the
    /// request.
    public static func isOfAPNs(_ response: PushResponse) -> Bool {
        if response.status == 200 { return response.apnsID != nil }
        let body = ResponseBody(response.body)
        guard statuses.contains(response.status), body.form == .object, let reason = body.reason else { return false }
        return reasons.contains(reason) || (body.isReasonOneWord && response.apnsID != nil)
    }

    /// What is said of a response for which `isOfAPNs` is false.
    public static func words(ofForeign status: Int32) -> String {
        "the server answered \(status), but not as APNs does"
    }

    /// The statuses that APNs uses.
    public static let statuses: Set<Int32> = [200, 400, 403, 404, 405, 410, 413, 429, 500, 503]

    /// The reasons that APNs uses, as far as this version knows.
    public static var reasons: Set<String> { ResponseBody.knownReasons }

    /// Five minutes. A result without `sent_at` counts as sent this long before it was queued: a device that registered between the
    /// send and the insert must not be suppressed.
    static let assumedDelay: Int64 = 300_000_000

    /// One day. A timestamp further ahead of the server's clock is a mistake: no clock is that fast.
    static let toleratedLead: Int64 = 86_400_000_000

    /// The verdict on one queued result.
    ///
    /// - A 410 makes a token stale only if APNs could have sent it: a JSON object with a reason, known or not, and an integer
    ///   `timestamp`. Every other 410 makes the token suspect as of the send, behind the mass-failure guard: a proxy that
    ///   responds with 410 must not suppress a whole fleet.
    /// - An instant in the future counts as `queuedAt`, so that the verdict depends on the row alone.
    public static func verdict(on result: SendResult) -> Verdict {
        guard let text = result.status, !text.isEmpty else {
            return .unintelligible(error: "status is missing, expected the HTTP status that APNs answered")
        }
        let status = result.statusCode
        if status == 200 { return .accepted }
        guard let status, (100...599).contains(status) else {
            // Only the beginning, as of a token: a sender may have mixed up its columns.
            return .unintelligible(
                error: "status is \(quoted(text, atMost: 8)), expected an HTTP status from 100 to 599")
        }
        do {
            return try verdict(on: result, status: status)
        } catch {
            return .unintelligible(error: error.message)
        }
    }

    private static func verdict(on result: SendResult, status: Int32) throws(Unintelligible) -> Verdict {
        let address = try address(of: result)
        let sentAt = try sentAt(of: result)
        let body = ResponseBody(result.body)
        switch (status, body.reason) {
        case (410, let reason):
            if let timestamp = body.timestamp {
                let at = try instant(ofTimestamp: timestamp, queuedAt: result.queuedAt)
                if let reason { return .stale(address, at: at, reason: reason) }
            }
            return .suspect(address, at: try sinceAPNs(sentAt), reason: doubt(about: body))
        case (_, let reason):
            switch Reason(status: status, reason) {
            case .token: return .suspect(address, at: try sinceAPNs(sentAt), reason: reason ?? Verdict.noReason)
            case .tooManyOfToken, .idle, .server: return .transient(reason: reason)
            case .message, .topic, .permission, .credential, .sender: return .sendersFault(reason: reason)
            }
        }
    }

    /// The reason under which a 410 counts if it makes its token suspect.
    private static func doubt(about body: ResponseBody) -> String {
        switch body.form {
        case .missing: Verdict.DoubtfulGone.noBody.rawValue
        case .foreign: Verdict.DoubtfulGone.foreignBody.rawValue
        case .word: body.reason ?? Verdict.noReason
        case .object:
            (body.reason == nil ? Verdict.DoubtfulGone.noReason : .noTimestamp).rawValue
        }
    }

    /// The reason of a 410 that made a token stale, if Apple does not document it for 410: Apple adds reasons without notice.
    public static func undocumentedReason(of verdict: Verdict) -> String? {
        guard case .stale(_, _, let reason) = verdict, reason != "Unregistered", reason != "ExpiredToken" else {
            return nil
        }
        return reason
    }

    private struct Unintelligible: Error {
        var message: String
    }

    private static func address(of result: SendResult) throws(Unintelligible) -> TokenAddress {
        guard let environment = Environment(rawValue: result.environment ?? Environment.production.rawValue) else {
            throw Unintelligible(
                message:
                    "environment is \(quoted(result.environment ?? "", atMost: 20)), expected 'production' or 'sandbox'"
            )
        }
        guard let topic = Topic(result.topic ?? "") else {
            throw Unintelligible(message: "topic \(Topic.fault(of: result.topic ?? "") ?? "")")
        }
        guard let text = result.token, !text.isEmpty else {
            throw Unintelligible(message: "device token is missing, expected hex")
        }
        guard let token = DeviceToken(spelled: text) else {
            // Only the beginning: the text may be a whole token with an extra blank, and logs must not show whole tokens.
            throw Unintelligible(
                message: "device token \(quoted(text, atMost: 8)) (\(text.utf8.count) bytes of text) is not hex of "
                    + "1 to \(DeviceToken.maximumLength) bytes")
        }
        return TokenAddress(environment: environment, topic: topic, token: token)
    }

    private static func sentAt(of result: SendResult) throws(Unintelligible) -> Instant {
        guard let sentAt = result.sentAt else { return result.queuedAt.advanced(byMicroseconds: -assumedDelay) }
        guard sentAt.isFinite else {
            throw Unintelligible(message: "sent_at is infinite, expected a finite instant")
        }
        return min(sentAt, result.queuedAt)
    }

    /// A suspect's instant is `sent_at`, so `sent_at` must be plausible.
    private static func sinceAPNs(_ sentAt: Instant) throws(Unintelligible) -> Instant {
        guard sentAt >= .beforeAPNs else {
            throw Unintelligible(message: "sent_at is before 2008, when APNs did not exist")
        }
        return sentAt
    }

    private static func instant(ofTimestamp milliseconds: Int64, queuedAt: Instant) throws(Unintelligible) -> Instant {
        let (microseconds, overflow) = milliseconds.multipliedReportingOverflow(by: 1000)
        let at = overflow ? (milliseconds > 0 ? .distantFuture : .distantPast) : Instant(microseconds: microseconds)
        guard at >= .beforeAPNs else {
            throw Unintelligible(
                message: "timestamp \(milliseconds) is before 2008, expected milliseconds since 1970 (not seconds)")
        }
        guard at <= queuedAt.advanced(byMicroseconds: toleratedLead) else {
            throw Unintelligible(message: "timestamp \(milliseconds) is more than a day in the future")
        }
        return min(at, queuedAt)
    }

    private static func quoted(_ text: String, atMost length: Int) -> String {
        "'\(text.prefix(length))'" + (text.count > length ? "..." : "")
    }
}
