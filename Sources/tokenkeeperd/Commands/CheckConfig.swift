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
        let credentials = try options.loadCredentials(of: configuration)
        if quiet { return }
        let ofCredentials = configuration.values.keys.filter { $0.hasPrefix("credential.") }.sorted()
        for setting in (Setting.table.map(\.key) + ofCredentials).compactMap(Setting.named) {
            let found = configuration.values[setting.key]
            let value = found?.value.map { setting.secret ? "(set, not shown)" : $0 } ?? "(unset)"
            print("\(setting.key) = \(value)  # \(found?.origin ?? "default")")
        }
        for credential in credentials { print("# \(credential)") }
    }
}
