internal import Glibc

/// Whether words that say how bad something is are printed in color. Only a person at a terminal sees color; a file, a pipe and
/// `--json` get the plain text.
enum Color {
    case none
    /// The eight colors that every terminal has (ECMA-48, SGR).
    case terminal

    /// How bad something is.
    enum Grade: String {
        case good = "32"
        case warning = "33"
        case critical = "1;31"
    }

    /// For standard output.
    static var ofOutput: Color {
        Color(
            isTerminal: isatty(STDOUT_FILENO) == 1,
            noColor: unsafe getenv("NO_COLOR").map { unsafe String(cString: $0) },
            term: unsafe getenv("TERM").map { unsafe String(cString: $0) })
    }

    /// - Parameters:
    ///   - noColor: The variable NO_COLOR; any text but the empty one means no: https://no-color.org
    ///   - term: The variable TERM.
    init(isTerminal: Bool, noColor: String?, term: String?) {
        self = isTerminal && (noColor ?? "").isEmpty && !["", "dumb"].contains(term ?? "") ? .terminal : .none
    }

    /// The word, in the color of the grade.
    func text(_ word: String, _ grade: Grade?) -> String {
        guard case .terminal = self, let grade else { return word }
        return "\u{1B}[\(grade.rawValue)m\(word)\u{1B}[0m"
    }
}
