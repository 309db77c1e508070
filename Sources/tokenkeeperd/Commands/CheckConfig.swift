internal import ArgumentParser

struct CheckConfig: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Check the configuration and print the settings in force, without connecting to the database.",
        discussion: "If anything is wrong, prints every problem with its file and line, and exits with 78.")

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print only problems.")
    var quiet = false

    func run() throws {
        Signals.unblock()
        let configuration = try options.load()
        // For a reload: credentials that systemd passes at the start cannot be read later, and need a restart anyway.
        if quiet { return }
        let credentials = try options.loadCredentials(of: configuration)
        let ofCredentials = configuration.values.keys.filter { $0.hasPrefix("credential.") }.sorted()
        for setting in (Setting.table.map(\.key) + ofCredentials).compactMap(Setting.named) {
            let found = configuration.values[setting.key]
            let value = found?.value.map { setting.secret ? "(set, not shown)" : $0 } ?? "(unset)"
            print("\(setting.key) = \(value)  # \(found?.origin ?? "default")")
        }
        for credential in credentials { print("# \(credential)") }
    }
}
