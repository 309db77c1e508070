internal import ArgumentParser

struct CheckConfig: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Check the configuration and print what is in force; the database is not asked.",
        discussion: "Leaves with 78 and every problem, file and line, when something is wrong.")

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print nothing but what is wrong.")
    var quiet = false

    func run() throws {
        Signals.unblock()
        let configuration = try options.load()
        // For a reload, which cannot read what systemd hands over at the start only: credentials take a restart anyway.
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
