internal import Glibc

/// The file of the refused records, and if the format has no place for causes, a second one for these. They are created with the
/// first refused record.
@safe struct RejectFile: ~Copyable {
    let path: String
    private var records = Output()
    private var causes = Output()

    /// A file that grows.
    private struct Output {
        var descriptor: Int32 = -1
        /// How long it is, in bytes.
        var length: Int64 = 0
    }

    static func causesPath(of path: String) -> String { path + ".causes" }

    /// For a new import.
    ///
    /// - Throws: If a file is there: somebody may still want to fix it. If none could be created there.
    init(new path: String) throws(ImportProblem) {
        self.path = path
        for path in [path, Self.causesPath(of: path)] where unsafe access(path, F_OK) == 0 {
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
    init(continuing path: String, records: Int64, causes: Int64) throws(ImportProblem) {
        self.path = path
        self.records = try Self.continued(path, records)
        self.causes = try Self.continued(Self.causesPath(of: path), causes)
    }

    deinit {
        for output in [records, causes] where output.descriptor >= 0 { close(output.descriptor) }
    }

    var recordsLength: Int64 { records.length }
    var causesLength: Int64 { causes.length }

    /// Appends, so that it is in the file before the import's position says so.
    ///
    /// - Parameter begin: What the file begins with.
    mutating func append(_ refused: [UInt8], causes text: [UInt8], begin: [UInt8]) throws(ImportProblem) {
        if refused.isEmpty { return }
        if records.length == 0 { try Self.write(begin, to: &records, path) }
        try Self.write(refused, to: &records, path)
        if !text.isEmpty { try Self.write(text, to: &causes, Self.causesPath(of: path)) }
    }

    private static func continued(_ path: String, _ length: Int64) throws(ImportProblem) -> Output {
        if length == 0 {
            // Never committed.
            guard unsafe unlink(path) == 0 || errno == ENOENT else { throw problem(path) }
            return Output()
        }
        let descriptor = unsafe open(path, O_WRONLY | O_CLOEXEC)
        let isThere = descriptor >= 0
        guard isThere, lseek(descriptor, 0, SEEK_END) >= off_t(length) else {
            if isThere { close(descriptor) }
            throw ImportProblem(
                "\(path) is not there any more, or shorter than it was: put it back, or begin again with --restart")
        }
        guard ftruncate(descriptor, off_t(length)) == 0, lseek(descriptor, 0, SEEK_END) == off_t(length) else {
            close(descriptor)
            throw problem(path)
        }
        return Output(descriptor: descriptor, length: length)
    }

    private static func write(_ bytes: [UInt8], to output: inout Output, _ path: String) throws(ImportProblem) {
        if output.descriptor < 0 {
            // Tokens are in it.
            output.descriptor = unsafe open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0o600)
            guard output.descriptor >= 0 else { throw problem(path) }
        }
        var written = 0
        while written < bytes.count {
            let descriptor = output.descriptor
            let count = unsafe bytes.withUnsafeBytes { buffer in
                unsafe Glibc.write(descriptor, buffer.baseAddress! + written, buffer.count - written)
            }
            if count < 0 && errno != EINTR { throw problem(path) }
            written += max(count, 0)
        }
        output.length += Int64(bytes.count)
    }

    private static func problem(_ path: String) -> ImportProblem {
        ImportProblem(
            "\(path), the file for refused rows, cannot be written (\(unsafe String(cString: strerror(errno))))"
        )
    }
}
