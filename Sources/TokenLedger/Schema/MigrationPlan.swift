internal import TokenModel

/// What a migration applies, all in one transaction.
public struct MigrationPlan: Equatable, Sendable {
    /// What happens to the roles' rights.
    public enum Rights: Equatable, Sendable {
        /// They are as this binary wants them, or another binary's.
        case keep
        case apply
        /// Roles are missing: `tokenkeeperd grants` creates them.
        case rolesMissing
    }

    /// The versions to apply, in order.
    public var versions: [Migration] = []
    /// The functions and views to apply: all of them, or none.
    public var repeatables: [Repeatable] = []
    /// The names of files that differ from what was applied: changed, new, or no longer there.
    public var differing: [String] = []
    public var rights: Rights = .keep

    /// Whether there is nothing to apply.
    public var isEmpty: Bool { versions.isEmpty && repeatables.isEmpty && rights != .apply }

    /// Whether it creates objects, which the applying role then owns. A plan of rights alone creates none, so an administrator may
    /// apply it too.
    var createsObjects: Bool { !versions.isEmpty || !repeatables.isEmpty }

    /// What is missing, as the subject of a sentence: `7 versions and 16 files of functions and views have`.
    var missing: String {
        let (versions, files) = (versions.count, differing.count)
        let parts = [
            versions == 0 ? nil : counted(versions, "version", "versions"),
            files == 0 ? nil : "\(counted(files, "file", "files")) of functions and views",
        ]
        return parts.compactMap { $0 }.joined(separator: " and ") + (versions + files == 1 ? " has" : " have")
    }

    /// The plan for people, a line for each step.
    ///
    /// - Parameter verb: `applied` or `would apply`.
    public func lines(_ verb: String) -> [String] {
        var lines = versions.map { "\(verb) version \($0.version) \($0.name)" }
        if !repeatables.isEmpty {
            // In a new schema, all are new.
            let isTelling = !differing.isEmpty && differing.count < repeatables.count
            let why = isTelling ? " (new or changed: \(differing.joined(separator: ", ")))" : ""
            lines.append("\(verb) all \(repeatables.count) files of functions and views\(why)")
        }
        if rights == .apply { lines.append("\(verb) grants: the roles exist and have their rights") }
        if isEmpty { lines.append("the schema is up to date") }
        if rights == .rolesMissing { lines.append("next: `tokenkeeperd grants` creates the roles") }
        return lines
    }
}
