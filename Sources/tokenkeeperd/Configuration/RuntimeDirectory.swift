internal import Glibc
internal import TokenLedger

/// The directory for files that the next start of the daemon needs: `runtime_directory`, or the one that systemd made. Or the directory for
/// provider tokens that several daemons share. Without them the daemon works too.
struct RuntimeDirectory {
    /// systemd sets it from the unit's `RuntimeDirectory=`: several absolute paths, separated by colons.
    ///
    /// https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html#RuntimeDirectory=
    static let variable = "RUNTIME_DIRECTORY"

    /// The settings that name such a directory.
    enum Purpose: String, CaseIterable {
        case runtime = "runtime_directory"
        case providerTokens = "send.provider_token_directory"
    }

    let purpose: Purpose
    let path: String
    /// Whether an operator chose it. Otherwise systemd did.
    let isExplicit: Bool

    /// Nil if neither the configuration nor systemd names one.
    init?(in values: [String: Configuration.Resolved], for purpose: Purpose = .runtime) {
        guard let found = values[purpose.rawValue], let path = found.value else { return nil }
        self.purpose = purpose
        self.path = path
        isExplicit = found.origin != Self.variable
    }

    /// The directory that systemd made; nil if there is none.
    static func first(in environment: [String: String]) -> String? {
        environment[variable]?.split(separator: ":").first.map(String.init)
    }

    /// Whether it belongs to another user than `user`, who is not root either: then it may be right for the daemon all the same.
    func isOfAnother(than user: uid_t) -> Bool {
        var about = stat()
        return unsafe stat(path, &about) == 0 && about.st_uid != user && user != 0
    }

    /// Why the daemon cannot use it, and what to do; nil if it can. Only the daemon's user may have access: other users could
    /// read a provider token, or replace it.
    ///
    /// - Parameter user: The user of this process. For root, a directory of any user will do if `rootChecks` is true.
    func fault(user: uid_t = geteuid(), rootChecks: Bool = false) -> String? {
        let name = "\(purpose.rawValue) \(ConfigurationProblems.quoted(path))"
        let word = ShellWord.quoted(path)
        guard path.hasPrefix("/") else { return "\(name): expected an absolute path" }
        var about = stat()
        guard unsafe stat(path, &about) == 0 else {
            return errno == ENOENT
                ? "\(name) does not exist: create it with mode 0700, owned by the daemon's user"
                : "\(name) cannot be read (\(SystemError.last))"
        }
        if about.st_mode & S_IFMT != S_IFDIR { return "\(name) is not a directory" }
        if about.st_uid != user && !(rootChecks && user == 0) {
            return "\(name) belongs to user \(about.st_uid), and this process runs as user \(user): "
                + "run `chown \(user) \(word)`"
        }
        if about.st_mode & 0o077 != 0 { return "\(name) is open to other users: run `chmod 700 \(word)`" }
        return nil
    }
}
