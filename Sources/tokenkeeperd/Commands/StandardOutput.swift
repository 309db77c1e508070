internal import ArgumentParser
internal import Glibc

/// What a command prints, which the C library holds back until there is enough of it.
enum StandardOutput {
    /// Writes the rest. A full disk is an error, and not an empty file. A reader that has gone, such as `head`, has what it wanted.
    ///
    /// - Throws: The exit status, after the error was printed.
    static func flush() throws(ExitCode) {
        guard fflush(nil) != 0, errno != EPIPE else { return }
        ConfigurationOptions.complain("the output could not be written: \(unsafe String(cString: strerror(errno)))")
        throw ExitCode(ExitStatus.output.rawValue)
    }
}
