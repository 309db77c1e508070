/// What a check of `tokenkeeperd doctor` has found.
public struct Finding: Encodable, Equatable, Sendable {
    /// What it asks of a person. The raw value is how the report names it.
    public enum Grade: String, Encodable, Sendable {
        /// Nothing to do.
        case passed = "ok"
        /// Worth knowing, and nothing to fix.
        case note
        /// Could not be checked; the words say what the check needs.
        case notChecked = "not checked"
        /// A person should fix it.
        case problem
    }

    public var grade: Grade
    /// What was checked, in two words.
    public var subject: String
    /// One line.
    public var words: String
    /// The commands that fix it, for a shell or, if they end with a semicolon, for psql. The operator chooses, if they are several. One in
    /// which a shell would expand something is left out: others may have chosen a name in it.
    public var commands: [String]

    public init(_ grade: Grade, _ subject: String, _ words: String, fixedBy commands: [String] = []) {
        self.grade = grade
        self.subject = subject
        self.words = words
        self.commands = commands.filter(ShellWord.isInert)
    }
}
