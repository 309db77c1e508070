/// Collects the problems of a configuration: the text of the first ones, and the number of the rest.
///
/// A broken file can have any number of problems, and the output must not grow with them.
struct ConfigurationProblems {
    /// The most problems whose text is reported.
    static let maximum = 20

    private var shown: [String] = []
    private var others = 0

    mutating func add(_ problem: @autoclosure () -> String) {
        if shown.count < Self.maximum { shown.append(problem()) } else { others += 1 }
    }

    mutating func add(_ error: ConfigurationError) {
        for problem in error.problems { add(problem) }
    }

    var isEmpty: Bool { shown.isEmpty }

    /// One line each; the last one may be `and 7 more`.
    var lines: [String] { others == 0 ? shown : shown + ["and \(others) more"] }

    /// The longest quotation of a key or a value, in Unicode scalars.
    private static let maximumQuotation = 60

    /// The beginning of a key or another word from the configuration.
    static func cut(_ text: String) -> String {
        let beginning = text.unicodeScalars.prefix(maximumQuotation)
        return beginning.endIndex == text.endIndex ? text : String(beginning) + "..."
    }

    /// The beginning of a text, in quotes.
    static func quoted(_ text: String) -> String {
        let beginning = text.unicodeScalars.prefix(maximumQuotation)
        return String(beginning).debugDescription + (beginning.endIndex == text.endIndex ? "" : "...")
    }

    /// The beginnings of the first few texts of an array.
    static func quoted(_ texts: [String]) -> String {
        let few = texts.prefix(5).map { quoted($0) } + (texts.count > 5 ? ["..."] : [])
        return "[" + few.joined(separator: ", ") + "]"
    }
}
