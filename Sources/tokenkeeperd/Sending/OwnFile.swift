internal import Glibc

/// Files that an earlier process of the same user has written.
enum OwnFile {
    /// Opens a file to read it. Follows no symbolic link.
    ///
    /// - Parameter user: The owner that the file must have.
    /// - Returns: The descriptor, which the caller closes, and the file's status. Nil unless it is a regular file of this user.
    static func opened(_ path: String, of user: uid_t = geteuid()) -> (file: Int32, status: stat)? {
        // A FIFO would block without O_NONBLOCK.
        let file = unsafe open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)
        if file < 0 { return nil }
        var status = stat()
        guard unsafe fstat(file, &status) == 0, status.st_mode & S_IFMT == S_IFREG, status.st_uid == user else {
            close(file)
            return nil
        }
        return (file, status)
    }
}

/// The error of the last system call of this thread.
enum SystemError {
    static var last: String { unsafe String(cString: strerror(errno)) }
}
