internal import Glibc

/// The content of a file that holds a secret. The memory is wiped when the last reference goes away.
///
/// A Swift `String` or `Array` leaves copies in memory that cannot be wiped. Password files and private keys therefore reach libpq,
/// OpenSSL and libcurl without becoming either; these libraries may keep copies of their own. `database_url` and the configuration
/// file do become a `String`, so they should not contain a password.
///
/// Sendable: the bytes never change after `init`.
@safe public final class SecretBytes: @unchecked Sendable {
    /// One byte longer than `count`: C needs a NUL at the end.
    private let memory: UnsafeMutableRawBufferPointer

    /// - Parameter fill: Writes the bytes, which are zero initially.
    public init(count: Int, fill: (UnsafeMutableRawBufferPointer) -> Void) {
        unsafe memory = UnsafeMutableRawBufferPointer.allocate(byteCount: count + 1, alignment: 1)
        _ = unsafe memory.initializeMemory(as: UInt8.self, repeating: 0)
        unsafe fill(UnsafeMutableRawBufferPointer(rebasing: memory[..<count]))
    }

    public convenience init(_ bytes: some Collection<UInt8>) {
        unsafe self.init(count: bytes.count) { memory in unsafe memory.copyBytes(from: bytes) }
    }

    /// Reads a regular file. A FIFO, a device or a socket is refused: nobody may write to the one, and the other may never end.
    ///
    /// - Parameter limit: The largest size in bytes.
    public convenience init(contentsOf path: String, limit: Int = 1 << 20) throws(UnreadableFile) {
        // Without O_NONBLOCK, opening a FIFO waits for its writer.
        let file = unsafe open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)
        guard file >= 0 else { throw UnreadableFile(error: errno) }
        defer { close(file) }
        var about = stat()
        guard unsafe fstat(file, &about) == 0 else { throw UnreadableFile(error: errno) }
        switch about.st_mode & S_IFMT {
        case S_IFREG: break
        case S_IFDIR: throw UnreadableFile(error: EISDIR)
        default: throw UnreadableFile.notRegular
        }
        let buffer = UnsafeMutableRawBufferPointer.allocate(byteCount: limit + 1, alignment: 1)
        var count = 0
        defer {
            unsafe explicit_bzero(buffer.baseAddress!, count)
            unsafe buffer.deallocate()
        }
        while count <= limit {
            let more = unsafe read(file, buffer.baseAddress! + count, buffer.count - count)
            if more < 0 && errno == EINTR { continue }
            if more < 0 { throw UnreadableFile(error: errno) }
            if more == 0 { break }
            count += more
        }
        guard count <= limit else { throw UnreadableFile(limit: limit) }
        unsafe self.init(count: count) { memory in
            unsafe memory.copyMemory(from: UnsafeRawBufferPointer(rebasing: buffer[..<count]))
        }
    }

    deinit {
        unsafe explicit_bzero(memory.baseAddress!, memory.count)
        unsafe memory.deallocate()
    }

    public var count: Int { unsafe memory.count - 1 }

    /// A NUL follows the bytes.
    public func withBytes<Answer: ~Copyable, Failure: Error>(
        _ use: (UnsafeRawBufferPointer) throws(Failure) -> Answer
    ) throws(Failure) -> Answer {
        try unsafe use(UnsafeRawBufferPointer(rebasing: memory[..<count]))
    }

    /// The bytes as a C string, which ends at the first NUL.
    public func withCString<Answer: ~Copyable, Failure: Error>(
        _ use: (UnsafePointer<CChar>) throws(Failure) -> Answer
    ) throws(Failure) -> Answer {
        try unsafe use(UnsafePointer(memory.baseAddress!.assumingMemoryBound(to: CChar.self)))
    }

    public func contains(_ byte: UInt8) -> Bool { unsafe withBytes { unsafe $0.contains(byte) } }

    /// The bytes before the first line end.
    public var firstLine: SecretBytes {
        unsafe withBytes { bytes in
            let text = unsafe bytes.starts(with: [0xEF, 0xBB, 0xBF]) ? bytes.dropFirst(3) : bytes[...]
            return unsafe SecretBytes(text.prefix { $0 != 0x0A && $0 != 0x0D })
        }
    }

    /// A copy that is not wiped: for public data, and for the configuration file, whose values become a `String` anyway.
    public var unprotected: [UInt8] { unsafe withBytes { unsafe Array($0) } }
}

extension SecretBytes: CustomStringConvertible {
    /// The size only.
    public var description: String { "\(count) bytes, not shown" }
}
