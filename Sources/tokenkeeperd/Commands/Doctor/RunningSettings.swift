internal import TokenLedger
internal import TokenModel

/// The settings of the running daemons, which may be others than those that `doctor` has read.
struct RunningSettings {
    private let daemons: [(name: String, settings: [String])]

    init(on connection: inout Connection) throws(DatabaseError) {
        daemons = try Heartbeat.settings(on: &connection)
    }

    init(_ daemons: [(name: String, settings: [String])]) { self.daemons = daemons }

    /// The longest `drain.lock_timeout` among them; that of `own` if none is running.
    func lockTimeout(own: Duration) -> Duration {
        daemons.map { values(of: $0.settings)["drain.lock_timeout"].flatMap(DurationText.duration) ?? Self.usual }.max()
            ?? own
    }

    private static let usual =
        Setting.named("drain.lock_timeout")?.defaultValue.flatMap(DurationText.duration) ?? .milliseconds(100)

    /// A note for each daemon whose settings differ from `own`.
    func findings(own: [String]) -> [Finding] {
        let here = values(of: own)
        let notes = daemons.compactMap { daemon -> Finding? in
            let there = values(of: daemon.settings)
            let keys = Set(here.keys).union(there.keys).filter { here[$0] != there[$0] }.sorted()
            if keys.isEmpty { return nil }
            let differences = keys.map { "\($0) is \(there[$0] ?? "the default"), here \(here[$0] ?? "the default")" }
            return Finding(
                .note, "configuration",
                "\(daemon.name) runs with other settings than doctor has read: \(differences.joined(separator: "; ")); "
                    + "name its file with --config, or restart it if the file has changed",
                fixedBy: ["systemctl restart tokenkeeperd"])
        }
        if !notes.isEmpty || daemons.isEmpty { return notes }
        return [Finding(.passed, "configuration", "what the running daemon uses")]
    }

    private func values(of settings: [String]) -> [String: String] {
        Dictionary(
            settings.map { setting in
                let parts = setting.split(separator: "=", maxSplits: 1, omittingEmptySubsequences: false).map(
                    String.init)
                return (parts[0], parts.count > 1 ? parts[1] : "")
            }, uniquingKeysWith: { $1 })
    }
}
