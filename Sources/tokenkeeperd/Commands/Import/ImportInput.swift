internal import Glibc
internal import TokenModel

/// The file that is imported, or standard input.
@safe struct ImportInput: ~Copyable {
    /// As given: `-` is standard input.
    let path: String
    private let descriptor: Int32
    private let about: stat

    /// How much of the beginning and the end tells files apart, in bytes.
    private static let block = 65_536

    init(_ path: String) throws(ImportProblem) {
        let opened = path == "-" ? STDIN_FILENO : unsafe open(path, O_RDONLY | O_CLOEXEC)
        guard opened >= 0 else { throw Self.problem(path) }
        var found = stat()
        guard unsafe fstat(opened, &found) == 0 else { throw Self.problem(path) }
        if found.st_mode & S_IFMT == S_IFDIR { throw ImportProblem("\(path) is a folder, expected a file or -") }
        self.path = path
        descriptor = opened
        about = found
    }

    deinit {
        if descriptor > STDIN_FILENO { close(descriptor) }
    }

    private static func problem(_ path: String) -> ImportProblem {
        ImportProblem("\(path): \(unsafe String(cString: strerror(errno)))")
    }

    /// Whether it can be continued: not standard input, and no pipe.
    var isFile: Bool { path != "-" && about.st_mode & S_IFMT == S_IFREG }

    /// In bytes; nil if it is not a file.
    var size: Int64? { isFile ? Int64(about.st_size) : nil }

    /// When the file was written last; nil if it is not a file.
    var modified: Instant? {
        isFile
            ? Instant(microseconds: Int64(about.st_mtim.tv_sec) * 1_000_000 + Int64(about.st_mtim.tv_nsec) / 1000) : nil
    }

    /// The absolute path of a file.
    var name: String {
        guard isFile, let resolved = unsafe realpath(path, nil) else { return path == "-" ? "standard input" : path }
        defer { unsafe free(resolved) }
        return unsafe String(cString: resolved)
    }

    /// Two processes that import one file would both continue the same import.
    ///
    /// - Returns: False if another process imports it.
    func lock() -> Bool { flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK }

    /// The size, and a hash of the beginning and the end: a file that has grown or was edited is another one.
    func fingerprint() -> String {
        var hash = Fingerprint()
        let size = Int64(about.st_size)
        for offset in [0, max(size - Int64(Self.block), 0)] {
            var bytes = [UInt8](repeating: 0, count: Self.block)
            let count = unsafe pread(descriptor, &bytes, bytes.count, off_t(offset))
            hash.add(bytes.prefix(max(count, 0)))
        }
        return "\(size)-\(hash.text)"
    }

    func seek(to offset: Int64) throws(ImportProblem) {
        guard lseek(descriptor, off_t(offset), SEEK_SET) >= 0 else { throw Self.problem(path) }
    }

    /// Reads what there is, up to the end of the buffer.
    ///
    /// - Parameters:
    ///   - count: How much of the buffer is filled.
    ///   - isStopped: Asked again and again while a pipe has nothing.
    /// - Returns: False at the end, or when it is stopped.
    func read(
        into buffer: inout [UInt8], filled count: inout Int, isStopped: () -> Bool
    ) throws(ImportProblem) -> Bool {
        while !isFile {
            var watched = pollfd(fd: descriptor, events: Int16(POLLIN), revents: 0)
            if unsafe poll(&watched, 1, 200) > 0 { break }
            if isStopped() { return false }
        }
        while true {
            let room = buffer.count - count
            let got = unsafe buffer.withUnsafeMutableBytes { bytes in
                unsafe Glibc.read(descriptor, bytes.baseAddress! + count, room)
            }
            if got >= 0 {
                count += got
                return got > 0
            }
            if errno != EINTR { throw Self.problem(path) }
        }
    }
}
