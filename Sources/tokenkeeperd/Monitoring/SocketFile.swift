internal import Glibc
internal import TokenLedger

/// The file of a Unix socket that the daemon listens on.
enum SocketFile {
    /// Who may connect: the daemon's user and the file's group.
    static let mode: mode_t = 0o660

    /// Why the daemon does not listen at a path.
    struct Occupied: Error, CustomStringConvertible {
        var description: String
    }

    /// Removes the socket that an earlier process of this user has left. Nothing else is removed: no other file, no socket of another user,
    /// and no socket that a process listens on.
    static func makeWay(at path: String) throws(Occupied) {
        var about = stat()
        guard unsafe lstat(path, &about) == 0 else {
            if errno == ENOENT { return }
            throw Occupied(description: "\(path): \(SystemError.last)")
        }
        guard about.st_mode & S_IFMT == S_IFSOCK else {
            throw Occupied(description: "\(path) exists and is not a socket")
        }
        guard about.st_uid == geteuid() else {
            throw Occupied(description: "\(path) belongs to user \(about.st_uid): run `rm \(ShellWord.quoted(path))`")
        }
        guard isAbandoned(path) else { throw Occupied(description: "another process listens at \(path)") }
        guard unsafe unlink(path) == 0 else { throw Occupied(description: "\(path): \(SystemError.last)") }
    }

    /// Whether no process listens there any more.
    private static func isAbandoned(_ path: String) -> Bool {
        let descriptor = socket(
            AF_UNIX, Int32(SOCK_STREAM.rawValue | SOCK_CLOEXEC.rawValue | SOCK_NONBLOCK.rawValue), 0)
        guard descriptor >= 0 else { return false }
        defer { close(descriptor) }
        var address = sockaddr_un()
        address.sun_family = sa_family_t(AF_UNIX)
        unsafe withUnsafeMutableBytes(of: &address.sun_path) { unsafe $0.copyBytes(from: path.utf8) }
        let connected = unsafe withUnsafePointer(to: &address) { pointer in
            unsafe pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { pointer in
                unsafe connect(descriptor, pointer, socklen_t(MemoryLayout<sockaddr_un>.size))
            }
        }
        return connected != 0 && errno == ECONNREFUSED
    }
}
