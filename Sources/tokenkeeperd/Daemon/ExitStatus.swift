/// How the process ends. The numbers are those of sysexits.h.
enum ExitStatus: Int32, Sendable {
    case success = 0
    /// The command line is wrong.
    case usage = 64
    /// A command that needs the database once could not reach it, or it refused.
    case unavailable = 69
    /// A sweep asked for on the command line failed, was interrupted, or refused to prune a topic.
    case failed = 70
    /// Another sweep is running: try again later.
    case busy = 75
    /// The configuration is wrong, or the schema does not fit: a person must act, a restart does not help.
    case configuration = 78
}
