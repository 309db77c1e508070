/// How the process ends. The numbers are those of sysexits.h.
enum ExitStatus: Int32, Sendable {
    case success = 0
    /// `doctor` has found something to fix, or `import` has refused rows.
    case somethingToFix = 1
    /// The command line is wrong.
    case usage = 64
    /// A command could not reach the database or APNs, or was refused.
    case unavailable = 69
    /// A sweep from the command line failed, was interrupted, or refused to prune a topic; or an import or a `campaign show --watch` was
    /// interrupted.
    case failed = 70
    /// A command did its work, and its output could not be written.
    case output = 74
    /// Another sweep is running: try again later.
    case busy = 75
    /// The configuration is wrong, or the schema does not fit. A person must act; a restart does not help.
    case configuration = 78
}
