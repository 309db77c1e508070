internal import ArgumentParser

/// A word where the name of a command is expected. Without this, a mistyped one counts as an argument of the default command.
enum UnknownCommand {
    /// - Parameter arguments: Those after the name of the command.
    /// - Returns: Nil if the names of all commands are known.
    static func problem(
        in arguments: ArraySlice<String>, of command: any ParsableCommand.Type, named name: String
    ) -> String? {
        let known = command.configuration.subcommands
        guard !known.isEmpty, let word = arguments.first, !word.hasPrefix("-"), word != "help" else { return nil }
        if let next = known.first(where: { $0._commandName == word }) {
            return problem(in: arguments.dropFirst(), of: next, named: "\(name) \(word)")
        }
        let names = known.map { $0._commandName }
        return
            "there is no command '\(word)' of \(name); expected \(names.dropLast().joined(separator: ", ")) or \(names.last ?? "")"
    }
}
