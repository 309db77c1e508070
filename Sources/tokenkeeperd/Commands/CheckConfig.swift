internal import ArgumentParser

struct CheckConfig: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Check the configuration and print what is in force; the database is not asked.",
        discussion: "Leaves with 78 and every problem, file and line, when something is wrong.")

    @OptionGroup var options: ConfigurationOptions

    func run() throws {
        Signals.unblock()
        let configuration = try options.load()
        for setting in Setting.table {
            let found = configuration.values[setting.key]
            let value = found?.value.map { setting.secret ? "(set, not shown)" : $0 } ?? "(unset)"
            print("\(setting.key) = \(value)  # \(found?.origin ?? "default")")
        }
    }
}
