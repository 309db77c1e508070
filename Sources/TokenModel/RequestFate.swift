/// What becomes of a request that was in hand, once it is known how its sending ended.
public enum RequestFate: Hashable, Sendable {
    /// APNs has answered, and that is all.
    case answered
    /// Given up, for the reason told: to `failed_send`.
    case failed(String)
    /// Tried again after the pause, because of what is told.
    case later(Duration, String)
    /// It may have been delivered, but no answer came: tried again after the pause, unless that has happened before.
    case interrupted(Duration, String)
    /// It waits again, as if it had not been tried; with a pause or as before.
    case returned(Duration?)

    /// What is told of it, if anything.
    public var error: String? {
        switch self {
        case .answered, .returned: nil
        case .failed(let error), .later(_, let error), .interrupted(_, let error): error
        }
    }
}
