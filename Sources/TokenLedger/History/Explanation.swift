internal import TokenModel

/// Explains a token and its events in plain words. Pure.
public enum Explanation {
    /// What happened, without its instant: `invalidated: APNs said Unregistered as of …`.
    public static func event(_ event: HistoryEvent) -> String {
        switch event.source {
        case .history: history(event)
        case .held where event.cause == "unregistered_by_app":
            "a logout that a source reported is held by the mass-failure guard; it would count as of "
                + "\(time(event.since)); see `tokenkeeperd held list`"
        case .held:
            "held by the mass-failure guard: \(answer(event.reason ?? "that it is bad")); it would count as of "
                + "\(time(event.since)); see `tokenkeeperd held list`"
        case .rejected:
            "a result could not be understood and did not count: \(event.message ?? "no error is kept"); "
                + "see `tokenkeeperd rejected list`"
        case .reinstatement:
            "(topic) \(event.doneBy ?? "an operator") reinstated: "
                + undone(event.cause)
                + "\(time(event.since)) to \(time(event.until)) do not count"
        case .operation: "(topic) " + operation(event)
        }
    }

    private static func history(_ event: HistoryEvent) -> String {
        let device =
            (event.deviceID.map { ", device \($0)" } ?? "") + (event.userID.map { ", user \($0)" } ?? "")
        switch event.event {
        case "registered":
            return "registered for the first time, as of \(time(event.registeredAfter))\(device)"
                + (isSuppressedAfter(event)
                    ? "; not later than what is known against it, \(time(event.invalidatedAfter))" : "")
        case "revived" where event.cause == "moved":
            return "revived: no other token supersedes it any more"
        case "revived" where event.cause == "returned":
            return "revived: its logout was taken back\(device)"
        case "revived":
            guard let registered = event.registeredAfter else { return "revived" }
            guard let stale = event.invalidatedAfter else {
                return "revived: registered as of \(registered.toTheSecond)\(device)"
            }
            let (later, earlier) = HistoryMoment.pair(registered, stale)
            return "revived: registered as of \(later), later than what was known against it, \(earlier)\(device)"
        case "invalidated":
            return
                "invalidated: \(said(event.cause, event.reason, event.invalidatedAfter, against: event.registeredAfter))"
        case "unregistered_by_app":
            return "unregistered by the app"
                + held(event.invalidatedAfter, against: event.registeredAfter)
        case "superseded":
            return
                "superseded: a newer token of the same device\(event.deviceID.map { ", \($0)," } ?? "") was registered"
        case "late_feedback_ignored":
            // The ledger keeps the greatest instant: it is of this feedback only if this feedback changed it.
            let said = event.invalidatedAfter != event.invalidatedBefore ? event.invalidatedAfter : nil
            guard let registered = event.registeredAfter else {
                return "came too late and was ignored: \(claim(event.cause, event.reason, said))"
            }
            let (earlier, later) = HistoryMoment.pair(said ?? registered, registered)
            return "came too late and was ignored: \(claim(event.cause, event.reason, nil))"
                + (said == nil ? "" : " as of \(earlier)") + ", which is earlier than the last registration, \(later)"
        case "user_changed":
            return event.userID.map { "passed to user \($0)" } ?? "belongs to no user any more"
        case "tagged": return "its tags were changed: \(event.reason ?? "")"
        case "pruned" where event.cause == "dormant":
            return "pruned: not registered again since \(time(event.registeredBefore))"
        case "pruned" where event.cause == "withdrawn":
            return "removed, because the \(event.reason ?? "source") that had made it was withdrawn"
        case "pruned":
            return "pruned, after it had been suppressed for long: "
                + claim(event.cause, event.reason, event.invalidatedBefore)
        case "reinstated":
            // The ledger keeps the greatest instant: it was that of the undone result only if undoing it changed it.
            let instant = event.invalidatedAfter != event.invalidatedBefore ? event.invalidatedBefore : nil
            // The reason names the logout's source (undo_unregistrations); otherwise it is one word of APNs.
            let logout = event.reason.flatMap { $0.hasPrefix("logout ") ? "the \($0)" : nil }
            let what = logout.map { $0 + asOf(instant) } ?? "that \(claim("suspect", event.reason, instant))"
            let undone = "reinstated: \(what) does not count any more"
            if isSuppressedAfter(event) {
                return undone + ", but something else still does, as of \(time(event.invalidatedAfter))"
            }
            return undone + (event.registeredAfter == nil && event.invalidatedAfter == nil ? "; unknown again" : "")
        default:
            return event.event + (event.reason.map { ": \($0)" } ?? "")
        }
    }

    private static func undone(_ cause: String?) -> String {
        switch cause {
        case "stale": "410s received from "
        case "unregistered_by_app": "logouts from attached tables and files received from "
        default: "suspects received from "
        }
    }

    private static func operation(_ event: HistoryEvent) -> String {
        let by = event.doneBy.map { " by \($0)" } ?? ""
        let results = event.rows.map { "\($0)" } ?? "the"
        return switch event.event {
        case "guard_tripped": "the mass-failure guard tripped" + (event.message.map { ": \($0)" } ?? "")
        case "guard_reset": "the mass-failure guard reset" + (event.message.map { ": \($0)" } ?? "")
        case "held_released": "\(results) held \(event.message ?? "results") were released\(by), to count after all"
        case "held_discarded": "\(results) held \(event.message ?? "results") were discarded\(by), and never count"
        case "policy_changed": "the policy was changed\(by)" + (event.message.map { ": \($0)" } ?? "")
        default: event.event + by + (event.message.map { ": \($0)" } ?? "")
        }
    }

    /// One sentence: whether the token may be sent to, and why.
    public static func verdict(_ history: TokenHistory) -> String {
        let moved = history.movedTo.map { "its topic has moved to the database \($0), which knows it now. Here: " }
        return (moved ?? "") + verdictHere(history)
    }

    private static func verdictHere(_ history: TokenHistory) -> String {
        guard history.isSuppressed else { return mayBeSentTo(history) }
        let why =
            switch history.state {
            case "superseded":
                history.newer.map {
                    "its device has a newer token, \($0.digits)…, registered at \($0.registeredAt.toTheSecond)"
                        + (history.registeredAt.map { "; its own last registration is \($0.toTheSecond)" } ?? "")
                } ?? "its device has registered a newer token"
            case "suspect": said("suspect", history.reason, history.invalidatedAt, against: history.registeredAt)
            case "unregistered_by_app":
                said("unregistered_by_app", nil, history.invalidatedAt, against: history.registeredAt)
            default: said("stale", history.reason, history.invalidatedAt, against: history.registeredAt)
            }
        return "must not be sent to: \(why)"
            + (history.isObserved ? ". The gate of its topic only observes, and answers true nevertheless" : "")
    }

    private static func mayBeSentTo(_ history: TokenHistory) -> String {
        guard history.state != nil else {
            let last = history.events.last { $0.source == .history }
            return switch last?.event {
            case "pruned": "may be sent to: it was pruned at \(time(last?.at)), and is unknown since"
            case "reinstated": "may be sent to: it is unknown again since it was reinstated at \(time(last?.at))"
            default: "may be sent to: the ledger does not know it"
            }
        }
        guard let registered = history.registeredAt else { return "may be sent to: nothing is known against it" }
        guard let stale = history.invalidatedAt else {
            return "may be sent to: last registered at \(registered.toTheSecond), and nothing is known against it"
        }
        let (later, earlier) = HistoryMoment.pair(registered, stale)
        let isApp = history.cause == "unregistered_by_app"
        return "may be sent to: last registered at \(later), which is later than what is known against it, that "
            + (isApp ? "the app unregistered it" : answer(history.reason ?? "410")) + " as of \(earlier)"
    }

    /// What would make the token sendable again; nil if the ledger knows it and it may be sent to.
    public static func revival(_ history: TokenHistory) -> String? {
        guard history.state != nil else { return "it is unknown now, so it may be sent to" }
        guard history.isSuppressed else { return nil }
        if history.state == "superseded" {
            return "a registration later than that of the device's newer token"
                + (history.newer.map { ", \($0.digits)…: \($0.registeredAt.exact)" } ?? "")
        }
        var words = "a registration later than \(history.invalidatedAt?.exact ?? "that")"
        // A registration between the two would be superseded at once.
        if let newer = history.newer, let stale = history.invalidatedAt, newer.registeredAt > stale {
            words =
                "a registration later than that of the device's newer token, \(newer.digits)…: \(newer.registeredAt.exact)"
        }
        if history.state == "suspect", let since = history.receivedSince, let until = history.receivedUntil {
            // In backticks, a topic that has one would end the command.
            let command =
                history.topic.contains("`")
                ? "tokenkeeperd reinstate"
                : "tokenkeeperd reinstate \(ShellWord.option("--topic", history.topic)) "
                    + "--environment \(history.environment) --since \(since.option) --until \(until.option)"
            words +=
                "; or, if it was a mistake, `\(command)`, which undoes what was received then (--dry-run says whether that is enough)"
        }
        return words
    }

    /// A cause in words, and how its instant compares with the registration that it suppresses.
    private static func said(
        _ cause: String?, _ reason: String?, _ at: HistoryMoment?, against registered: HistoryMoment?
    ) -> String {
        claim(cause, reason, nil) + held(at, against: registered)
    }

    private static func held(_ at: HistoryMoment?, against registered: HistoryMoment?) -> String {
        guard let at else { return "" }
        guard let registered else { return " as of \(at.toTheSecond), and it was never registered" }
        let (stale, last) = HistoryMoment.pair(at, registered)
        return " as of \(stale), which is not earlier than the last registration, \(last)"
    }

    /// A 410 without what APNs sends with every 410 comes from the sender or a proxy.
    private static func answer(_ reason: String) -> String {
        Verdict.DoubtfulGone(rawValue: reason) == nil ? "APNs said \(reason)" : "the sender reported a \(reason)"
    }

    private static func claim(_ cause: String?, _ reason: String?, _ at: HistoryMoment?) -> String {
        let who =
            switch cause {
            case "unregistered_by_app": "the app unregistered it"
            case "superseded": "its device had a newer token"
            case "suspect": answer(reason ?? "that it is bad")
            default: answer(reason ?? "410")
            }
        return who + asOf(at)
    }

    private static func asOf(_ moment: HistoryMoment?) -> String { moment.map { " as of \($0.toTheSecond)" } ?? "" }

    private static func isSuppressedAfter(_ event: HistoryEvent) -> Bool {
        guard let stale = event.invalidatedAfter else { return false }
        return event.registeredAfter.map { stale >= $0 } ?? true
    }

    private static func time(_ moment: HistoryMoment?) -> String { moment?.toTheSecond ?? "an unknown instant" }
}
