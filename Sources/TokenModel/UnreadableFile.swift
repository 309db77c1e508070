internal import Glibc

/// Why a file cannot be read.
public struct UnreadableFile: Error, Equatable, CustomStringConvertible {
    /// In words, without the file's name: `No such file or directory`, `Permission denied for user 997`, `larger than 1 MiB`,
    /// `not a regular file`.
    public let description: String

    /// - Parameter error: The `errno` of the call that failed.
    public init(error: Int32) {
        let words = unsafe String(cString: strerror(error))
        // The usual cause: the file belongs to somebody else, or one of the folders does.
        description = error == EACCES ? "\(words) for user \(geteuid())" : words
    }

    /// - Parameter limit: The largest size in bytes.
    init(limit: Int) {
        description = "larger than \(limit >> 20) MiB"
    }

    private init(_ description: String) {
        self.description = description
    }

    static let notRegular = UnreadableFile("not a regular file")
}
