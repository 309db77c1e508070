internal import Glibc

/// The file of the refused records. It is created with the first one.
@safe struct RejectFile: ~Copyable {
    let path: String
    private var descriptor: Int32 = -1
    /// How long it is, in bytes.
    private(set) var length: Int64 = 0

    /// For a new import.
    ///
    /// - Throws: If a file is there: somebody may still want to fix it. If none could be created there.
    init(new path: String) throws(ImportProblem) {
        self.path = path
        guard unsafe access(path, F_OK) != 0 else {
            throw ImportProblem(
                "\(path) exists, maybe with what an earlier import has refused: move it away, or name another file with --rejects"
            )
        }
        let folder = path.lastIndex(of: "/").map { String(path[...$0]) } ?? "."
        guard unsafe access(folder, W_OK | X_OK) == 0 else {
            throw ImportProblem("\(Self.problem(path).description): name another one with --rejects")
        }
    }

    /// For an import that continues: what was written after the last commit is removed.
    init(continuing path: String, length: Int64) throws(ImportProblem) {
        self.path = path
        // Without a commit, a file that is there is of this import only if it begins with the same rows: see append.
        if length == 0 { return }
        descriptor = unsafe open(path, O_WRONLY | O_CLOEXEC)
        guard descriptor >= 0, lseek(descriptor, 0, SEEK_END) >= off_t(length) else {
            throw ImportProblem(
                "\(path) is not there any more, or shorter than it was: put it back, or begin again with --restart")
        }
        guard ftruncate(descriptor, off_t(length)) == 0, lseek(descriptor, 0, SEEK_END) == off_t(length) else {
            throw Self.problem(path)
        }
        self.length = length
    }

    deinit {
        if descriptor >= 0 { close(descriptor) }
    }

    /// Appends, so that it is in the file before the import's position says so.
    ///
    /// - Parameter begin: What the file begins with.
    mutating func append(_ refused: [UInt8], begin: [UInt8]) throws(ImportProblem) {
        if refused.isEmpty { return }
        if length == 0 {
            try removeUncommitted(begin + refused)
            try write(begin)
        }
        try write(refused)
    }

    /// Removes what an earlier run has written and not committed. It is another import's if it is not the beginning of what is written now, or
    /// the other way round.
    private func removeUncommitted(_ bytes: [UInt8]) throws(ImportProblem) {
        let old = unsafe open(path, O_RDONLY | O_CLOEXEC)
        if old < 0, errno == ENOENT { return }
        guard old >= 0 else { throw Self.problem(path) }
        defer { close(old) }
        var read = [UInt8](repeating: 0, count: bytes.count)
        let count = unsafe pread(old, &read, read.count, 0)
        guard count >= 0 else { throw Self.problem(path) }
        guard read.prefix(count) == bytes.prefix(count) else {
            throw ImportProblem("\(path) has what another import has refused: move it away")
        }
        guard unsafe unlink(path) == 0 else { throw Self.problem(path) }
    }

    private mutating func write(_ bytes: [UInt8]) throws(ImportProblem) {
        if descriptor < 0 {
            // Tokens are in it.
            descriptor = unsafe open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0o600)
            guard descriptor >= 0 else { throw Self.problem(path) }
        }
        var written = 0
        while written < bytes.count {
            let descriptor = descriptor
            let count = unsafe bytes.withUnsafeBytes { buffer in
                unsafe Glibc.write(descriptor, buffer.baseAddress! + written, buffer.count - written)
            }
            if count < 0 && errno != EINTR { throw Self.problem(path) }
            written += max(count, 0)
        }
        length += Int64(bytes.count)
    }

    private static func problem(_ path: String) -> ImportProblem {
        ImportProblem(
            "\(path), the file for refused rows, cannot be written (\(unsafe String(cString: strerror(errno))))"
        )
    }
}
