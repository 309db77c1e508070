internal import TokenLedger

/// How the process ends. The numbers are those of sysexits.h.
enum ExitStatus: Int32, Sendable {
    case success = 0
    /// The command has done its work, and a person should look: `doctor` found something to fix, `import` refused rows, `backfill --check`
    /// found differences, or `send` found no sendable token.
    case somethingToFix = 1
    /// The command line is wrong, or PostgreSQL refused an argument.
    case usage = 64
    /// A command could not reach the database or APNs, or was refused.
    case unavailable = 69
    /// The work was not done to its end: it was interrupted, a sweep failed or refused to prune a topic, or a file could not be read.
    case failed = 70
    /// A command did its work, and its output could not be written.
    case output = 74
    /// Another sweep is running: try again later.
    case busy = 75
    /// The configuration is wrong, no database is named, or the schema does not fit. A person must act; a restart does not help.
    case configuration = 78

    /// What a command exits with after an error of the database.
    init(_ error: DatabaseError) {
        self =
            switch error.kind {
            case .configuration: .configuration
            // An argument: https://www.postgresql.org/docs/current/errcodes-appendix.html
            case .server(let state) where ["22007", "22008", "22023", "22P02"].contains(state): .usage
            default: .unavailable
            }
    }
}
