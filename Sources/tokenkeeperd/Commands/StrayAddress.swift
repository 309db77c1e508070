/// A connection string in the wrong place of the command line or the configuration. It may contain a password, so no message
/// repeats it.
enum StrayAddress {
    static let advice =
        "name the database with --database-url, TOKENKEEPER_DATABASE_URL or database_url in the configuration file, and its password in database_password_file"

    /// Whether a text looks like the URL of a database, or like a part of a `key=value` connection string with a password. libpq
    /// allows blanks around the `=`.
    ///
    /// https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-KEYWORD-VALUE
    static func isLikely(_ text: String) -> Bool {
        let bytes = text.utf8.map { (0x41...0x5A).contains($0) ? $0 + 0x20 : $0 }
        return bytes.indices.contains { start in
            let rest = bytes[start...]
            if rest.starts(with: "://".utf8) { return true }
            return rest.starts(with: "password".utf8)
                && rest.dropFirst("password".utf8.count).first { !isBlank($0) } == UInt8(ascii: "=")
        }
    }

    /// Like C's `isspace`, which libpq uses.
    private static func isBlank(_ byte: UInt8) -> Bool { byte == 0x20 || (0x09...0x0D).contains(byte) }

    /// - Parameters:
    ///   - message: What is wrong with the command line; it quotes arguments.
    ///   - arguments: Without the program's name.
    /// - Returns: What to print instead of the message; nil if the message is safe to print.
    static func problem(insteadOf message: String, arguments: [String]) -> String? {
        let isQuoted = arguments.contains { argument in
            let value = argument.split(separator: "=", maxSplits: 1).last.map(String.init) ?? argument
            return isLikely(argument) && (message.contains(argument) || message.contains(value))
        }
        // `password = secret` without quotes is three arguments, and `password= secret` two.
        let isQuotedInParts = arguments.indices.contains { start in
            let parts = arguments[start...].prefix(3)
            return isLikely(parts.joined(separator: " ")) && parts.allSatisfy { !isLikely($0) || $0.hasSuffix("=") }
                && parts.contains { message.contains("'\($0)'") }
        }
        return isQuoted || isQuotedInParts
            ? "found a connection string where none is expected: \(advice)" : nil
    }
}
