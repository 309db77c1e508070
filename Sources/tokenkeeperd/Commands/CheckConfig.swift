internal import APNsFeedback
internal import ArgumentParser

struct CheckConfig: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Check the configuration and print the settings in force.",
        discussion: """
            Prints each problem with its file and line, and exits with 78 if there is one. With --online, also \
            connects to PostgreSQL and, for each credential, to APNs, verifies the certificates, and sends one request \
            per topic, for a token that no device has. Exits with 69 if one of these fails.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print only problems. Reads no credential and no certificate to trust.")
    var quiet = false

    @Flag(help: "Also try PostgreSQL and APNs. Sends nothing to any device.")
    var online = false

    @Flag(help: "Print the settings as JSON.")
    var json = false

    func validate() throws {
        if [quiet, online, json].count(where: \.self) > 1 {
            throw ValidationError("Give one of --quiet, --online and --json.")
        }
    }

    func run() throws {
        Signals.unblock()
        let configuration = try options.load()
        try options.checkRuntimeDirectories(of: configuration)
        // For a reload: credentials that systemd passes at the start cannot be read later, and need a restart anyway.
        if quiet { return }
        // A token of the daemon on this machine is used again: APNs refuses a new one within 20 minutes.
        let credentials = try options.loadCredentials(
            of: configuration, ProviderTokens(keptIn: online ? configuration.providerTokenDirectory : nil))
        let ofCredentials = configuration.values.keys.filter { $0.hasPrefix("credential.") }.sorted()
        let rows = (Setting.table.map(\.key) + ofCredentials).compactMap(Setting.named).map { setting in
            Row(setting, configuration.values[setting.key])
        }
        if json {
            print(try JSONOutput.array(rows))
        } else {
            for row in rows { print("\(row.key) = \(row.value ?? "(unset)")  # \(row.origin)") }
            for credential in credentials { print("# \(credential)") }
        }
        if !credentials.isEmpty, let fault = TrustedCertificates.fault(of: configuration.clientOptions) {
            ConfigurationOptions.complain("\(fault): set send.ca_file, or install the package ca-certificates")
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
        if online { try OnlineCheck(configuration: configuration, credentials: credentials).run() }
    }

    /// A setting in force.
    private struct Row: Encodable {
        let key: String
        /// As in the file, without quotes; nil if it is unset.
        let value: String?
        /// Where it was set.
        let origin: String

        init(_ setting: Setting, _ found: Configuration.Resolved?) {
            key = setting.key
            value = found?.value.map { setting.secret ? "(set, not shown)" : $0 }
            origin = found?.origin ?? "default"
        }
    }
}
