internal import Glibc

/// systemd's journal, if it reads standard error.
///
/// https://www.freedesktop.org/software/systemd/man/systemd.exec.html#%24JOURNAL_STREAM
enum Journal {
    /// The variable alone does not prove it: a shell in a terminal may have inherited it.
    static let isListening: Bool = {
        guard let stream = unsafe getenv("JOURNAL_STREAM") else { return false }
        var about = stat()
        guard unsafe fstat(STDERR_FILENO, &about) == 0 else { return false }
        return unsafe String(cString: stream) == "\(about.st_dev):\(about.st_ino)"
    }()
}
