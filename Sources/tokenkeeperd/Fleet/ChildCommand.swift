internal import Glibc

/// This program, run once more for one database. A server that hangs holds up only its own child, which can be killed.
final class ChildCommand {
    /// Of the database.
    let name: String
    private let process: pid_t
    private(set) var output: ChildPipe
    private(set) var errors: ChildPipe

    /// - Throws: What the system says.
    init(_ name: String, _ arguments: [String], environment: [String: String]) throws(ConfigurationError) {
        self.name = name
        let (output, outputEnd) = try ChildPipe.make()
        let (errors, errorsEnd) = try ChildPipe.make()
        defer {
            close(outputEnd)
            close(errorsEnd)
        }
        var actions = unsafe posix_spawn_file_actions_t()
        unsafe posix_spawn_file_actions_init(&actions)
        defer { unsafe posix_spawn_file_actions_destroy(&actions) }
        unsafe posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0)
        unsafe posix_spawn_file_actions_adddup2(&actions, outputEnd, STDOUT_FILENO)
        unsafe posix_spawn_file_actions_adddup2(&actions, errorsEnd, STDERR_FILENO)
        var words = unsafe (["tokenkeeperd"] + arguments).map { unsafe strdup($0) } + [nil]
        var variables = unsafe environment.map { unsafe strdup("\($0)=\($1)") } + [nil]
        defer { unsafe Self.free(words + variables) }
        var process: pid_t = 0
        let result = unsafe posix_spawn(&process, "/proc/self/exe", &actions, nil, &words, &variables)
        self.process = process
        (self.output, self.errors) = (output, errors)
        if result != 0 { throw ConfigurationError(["\(name): \(unsafe String(cString: strerror(result)))"]) }
    }

    private static func free(_ texts: [UnsafeMutablePointer<CChar>?]) {
        for place in unsafe texts.indices { unsafe Glibc.free(texts[place]) }
    }

    /// The ends of its pipes that are still open.
    var openPipes: [CInt] { [output.end, errors.end].filter { $0 >= 0 } }

    /// Reads what is there from one of the pipes.
    func read(from pipe: CInt) {
        if pipe == output.end { output.read() } else { errors.read() }
    }

    /// Waits for its end, after the pipes have closed, or kills it.
    ///
    /// - Returns: Its exit status; nil if it was killed.
    func end(kills: Bool) -> CInt? {
        if kills { kill(process, SIGKILL) }
        var status: CInt = 0
        while unsafe waitpid(process, &status, 0) < 0, errno == EINTR {}
        return status & 0x7f == 0 ? status >> 8 & 0xff : nil
    }
}

/// What a child prints.
struct ChildPipe {
    /// -1 once it was read to its end.
    private(set) var end: CInt
    private(set) var bytes: [UInt8] = []

    /// - Returns: The pipe, and the end for the child.
    static func make() throws(ConfigurationError) -> (ChildPipe, CInt) {
        var ends: [CInt] = [-1, -1]
        if unsafe pipe(&ends) != 0 { throw ConfigurationError([SystemError.last]) }
        // A child keeps no end of the others' pipes.
        for end in ends { _ = fcntl(end, F_SETFD, FD_CLOEXEC) }
        return (ChildPipe(end: ends[0]), ends[1])
    }

    mutating func read() {
        var some = [UInt8](repeating: 0, count: 65536)
        let count = unsafe Glibc.read(end, &some, some.count)
        if count < 0, errno == EINTR { return }
        if count > 0 {
            bytes += some.prefix(count)
        } else {
            close(end)
            end = -1
        }
    }

    /// Without the line break at the end.
    var text: String {
        let text = String(decoding: bytes, as: UTF8.self)
        return text.hasSuffix("\n") ? String(text.dropLast()) : text
    }
}
