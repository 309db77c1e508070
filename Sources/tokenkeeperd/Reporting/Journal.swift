internal import Glibc

/// The journal, when it reads our standard error.
///
/// https://www.freedesktop.org/software/systemd/man/systemd.exec.html#%24JOURNAL_STREAM
enum Journal {
    /// Whether it does: the variable alone may have been inherited by a shell in a terminal.
    static let isListening: Bool = {
        guard let stream = unsafe getenv("JOURNAL_STREAM") else { return false }
        var about = stat()
        guard unsafe fstat(STDERR_FILENO, &about) == 0 else { return false }
        return unsafe String(cString: stream) == "\(about.st_dev):\(about.st_ino)"
    }()
}
