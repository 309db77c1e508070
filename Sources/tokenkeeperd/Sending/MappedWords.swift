internal import Glibc
internal import Synchronization

/// A file of 64-bit words, mapped into memory. What was stored stays in the file when the process is killed: it is in the kernel's
/// page cache.
///
/// Sendable although it holds a pointer: each access is atomic, and the memory is mapped until the last reference goes away.
@safe struct MappedWords: ~Copyable, @unchecked Sendable {
    struct Failure: Error {
        /// What failed, and the system's error.
        var message: String

        init(_ what: String) {
            message = "\(what): \(SystemError.last)"
        }
    }

    private let words: UnsafeMutableBufferPointer<Atomic<Int64>>

    /// Makes a new file of zeros that only this user can read. Allocates its disk space at once: if a later store met a full disk,
    /// SIGBUS would end the process.
    init(creating path: String, count: Int) throws(Failure) {
        let file = unsafe open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0o600)
        guard file >= 0 else { throw Failure("\(path) cannot be created") }
        defer { close(file) }
        let fault = posix_fallocate(file, 0, count * MemoryLayout<Int64>.size)
        guard fault == 0 else {
            errno = fault
            throw Failure("\(path) gets no memory")
        }
        unsafe words = try Self.map(file, count: count, PROT_READ | PROT_WRITE, path)
    }

    /// - Returns: Nil if it is not a file of this user with whole words.
    init?(reading path: String) {
        guard let (file, status) = OwnFile.opened(path) else { return nil }
        defer { close(file) }
        let (size, word) = (Int(status.st_size), MemoryLayout<Int64>.size)
        guard size > 0, size % word == 0, let words = unsafe try? Self.map(file, count: size / word, PROT_READ, path)
        else { return nil }
        unsafe self.words = words
    }

    deinit {
        unsafe munmap(words.baseAddress, words.count * MemoryLayout<Int64>.size)
    }

    private static func map(
        _ file: Int32, count: Int, _ protection: Int32, _ path: String
    ) throws(Failure) -> UnsafeMutableBufferPointer<Atomic<Int64>> {
        let memory = unsafe mmap(nil, count * MemoryLayout<Int64>.size, protection, MAP_SHARED, file, 0)
        guard let memory = unsafe memory, unsafe memory != MAP_FAILED else { throw Failure("\(path) cannot be mapped") }
        return unsafe UnsafeMutableBufferPointer(
            start: memory.bindMemory(to: Atomic<Int64>.self, capacity: count), count: count)
    }

    var count: Int { unsafe words.count }

    // Relaxed accesses suffice. A kill stops all threads at once, and what a thread has stored before a system call stays stored:
    // the compiler moves no store behind the call, and the processor completes its stores in order. Threads of this process learn of
    // each other's requests through a lock.

    func load(_ place: Int) -> Int64 { unsafe words[place].load(ordering: .relaxed) }

    func store(_ value: Int64, at place: Int) { unsafe words[place].store(value, ordering: .relaxed) }

    /// Stores the value, unless another thread has changed it.
    func replace(_ old: Int64, by new: Int64, at place: Int) {
        _ = unsafe words[place].compareExchange(expected: old, desired: new, ordering: .relaxed)
    }
}
