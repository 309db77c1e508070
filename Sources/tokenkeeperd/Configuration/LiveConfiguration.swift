internal import Synchronization

/// The configuration in force. A reload can change it while the workers use it.
final class LiveConfiguration: Sendable {
    private let configuration: Mutex<Configuration>

    init(_ configuration: Configuration) {
        self.configuration = Mutex(configuration)
    }

    var current: Configuration { configuration.withLock { $0 } }

    /// What a reload changed.
    struct Outcome: Equatable {
        /// `key: before -> after` for each setting that has changed; only the key for a secret.
        var taken: [String] = []
        /// The keys of settings that need a restart.
        var waiting: [String] = []
    }

    /// Applies the reloadable settings, and returns what has changed and what needs a restart.
    func take(_ new: Configuration) -> Outcome {
        configuration.withLock { configuration in
            var outcome = Outcome()
            var values = configuration.values
            for setting in Setting.table {
                guard let after = new.values[setting.key], let before = values[setting.key] else { continue }
                if before.value == after.value || setting.reloadable { values[setting.key] = after }
                guard before.value != after.value else { continue }
                if setting.reloadable {
                    let change = "\(before.value ?? "unset") -> \(after.value ?? "unset")"
                    outcome.taken.append(setting.secret ? setting.key : "\(setting.key): \(change)")
                } else {
                    outcome.waiting.append(setting.key)
                }
            }
            // Any change of credentials needs a restart.
            let ofCredentials = Set(values.keys).union(new.values.keys).filter { $0.hasPrefix("credential.") }
            outcome.waiting += ofCredentials.filter { values[$0]?.value != new.values[$0]?.value }.sorted()
            configuration = Configuration(values: values, address: configuration.address)
            return outcome
        }
    }
}
