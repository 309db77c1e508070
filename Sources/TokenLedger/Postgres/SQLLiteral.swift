/// Quotes texts for statements that are printed: a script of `migrate --print`, or a statement that a message shows. A topic is
/// whatever a sender wrote. Statements that the daemon itself runs have parameters instead.
public enum SQLLiteral {
    public static func quoted(_ text: String) -> String {
        "'" + text.split(separator: "'", omittingEmptySubsequences: false).joined(separator: "''") + "'"
    }
}
