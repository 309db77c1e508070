/// Why a text is not in the supported subset of TOML: where, what was found and what is expected.
///
/// It quotes at most one character and never a value, which may be a secret.
struct TOMLError: Error, Equatable, CustomStringConvertible {
    /// Both from 1. The column counts Unicode scalars.
    var line: Int
    var column: Int
    var found: String
    var expected: String

    var description: String { "\(line):\(column): found \(found), expected \(expected)" }
}
