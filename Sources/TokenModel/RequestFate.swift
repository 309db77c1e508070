/// What becomes of a claimed request after an attempt to send it.
public enum RequestFate: Hashable, Sendable {
    /// APNs responded, and the request is finished.
    case answered
    /// The request moves to `failed_send`, with this error.
    case failed(String)
    /// The request is retried after the pause, because of this error.
    case later(Duration, String)
    /// The same, because APNs refused the request while it accepted others of its topic. After a few, it fails.
    case refused(Duration, String)
    /// The attempt was interrupted: the notification may have been delivered, but no response came. The request is retried after the
    /// pause, unless this has happened before.
    case interrupted(Duration, String)
    /// The request waits again as if it had not been tried: for the pause, or until its earlier due time if the pause is nil.
    case returned(Duration?)

    /// The error, if there is one.
    public var error: String? {
        switch self {
        case .answered, .returned: nil
        case .failed(let error), .later(_, let error), .refused(_, let error), .interrupted(_, let error): error
        }
    }
}
