internal import APNsFeedback
internal import Glibc
internal import Logging
internal import Synchronization

/// Keeps the provider token of one key in the runtime directory, in a file that only this user can read.
///
/// The file is replaced as a whole, by renaming. Daemons that share the directory share the token.
final class ProviderTokenFile: ProviderTokenStore {
    let path: String
    private let directory: String
    private let user: uid_t
    private let patience: Duration
    private let logger: Logger?
    private let hasComplained = Atomic(false)

    /// A token has some 200 bytes.
    private static let maximumSize = 1024

    /// - Parameters:
    ///   - directory: Only this user has access to it.
    ///   - keyID: Of A to Z and 0 to 9, as is `teamID`: both are parts of the file's name, and not secret.
    ///   - user: The owner of the file. Only tests name another one.
    ///   - patience: How long to wait for another process that holds the lock. One that was stopped may hold it for hours.
    init(
        in directory: String, keyID: String, teamID: String, user: uid_t = geteuid(),
        patience: Duration = .milliseconds(100), logger: Logger?
    ) {
        self.directory = directory
        path = "\(directory)/provider-token-\(teamID)-\(keyID)"
        self.user = user
        self.patience = patience
        self.logger = logger
    }

    func replace(_ choose: (_ kept: String?) throws(CredentialError) -> String) throws(CredentialError) {
        // Without the lock, two processes might each make a token. That is no reason not to send.
        let lock = locked()
        defer { if let lock { close(lock) } }
        let kept = read()
        let chosen = try choose(kept)
        if chosen == kept { return }
        if let error = write(chosen), let logger, !hasComplained.exchange(true, ordering: .relaxed) {
            logger.warning(
                "the provider token cannot be kept; after a restart, APNs may refuse a new one for 20 minutes",
                metadata: ["path": "\(path)", "error": "\(error)"])
        }
    }

    /// The directory, open and locked, so that no other process replaces a token. Nil if that did not work in time.
    private func locked() -> CInt? {
        let directory = unsafe open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
        if directory < 0 { return nil }
        let until = ContinuousClock.now + patience
        repeat {
            if flock(directory, LOCK_EX | LOCK_NB) == 0 { return directory }
            usleep(1000)
        } while .now < until
        close(directory)
        return nil
    }

    /// The kept text. Nil if the file does not exist, is not a file of this user that others cannot read, or is too long.
    private func read() -> String? {
        guard let (file, status) = OwnFile.opened(path, of: user) else { return nil }
        defer { close(file) }
        guard status.st_mode & 0o077 == 0 else { return nil }
        var bytes = [UInt8](repeating: 0, count: Self.maximumSize + 1)
        let count = unsafe Glibc.read(file, &bytes, bytes.count)
        guard 1...Self.maximumSize ~= count else { return nil }
        return String(validating: bytes.prefix(count), as: UTF8.self)
    }

    /// - Returns: What went wrong; nil if the file is written.
    private func write(_ text: String) -> String? {
        let new = "\(path).\(getpid())"
        // What a killed process of the same number has left.
        _ = unsafe unlink(new)
        let file = unsafe open(new, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0o600)
        if file < 0 { return SystemError.last }
        let bytes = Array(text.utf8)
        let isWritten = unsafe Glibc.write(file, bytes, bytes.count) == bytes.count
        let error = isWritten ? nil : SystemError.last
        close(file)
        if isWritten, unsafe rename(new, path) == 0 { return nil }
        defer { _ = unsafe unlink(new) }
        return error ?? SystemError.last
    }
}
