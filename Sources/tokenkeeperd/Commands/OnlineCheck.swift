internal import APNsFeedback
internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// `check-config --online`: tries each connection that the daemon would make.
struct OnlineCheck {
    let configuration: Configuration
    let credentials: [LoadedCredential]

    /// A connection to try.
    private struct Trial {
        var what: String
        /// Nil if it works.
        var failure: () -> String?
    }

    /// Prints a line for each connection.
    ///
    /// - Throws: The exit status, if a connection fails.
    func run() throws {
        var hasFailed = false
        for trial in [database] + apns {
            if let failure = trial.failure() {
                hasFailed = true
                ConfigurationOptions.complain("\(trial.what): \(failure)")
            } else {
                print("# \(trial.what): works")
            }
        }
        if hasFailed { throw ExitCode(ExitStatus.unavailable.rawValue) }
    }

    private var database: Trial {
        Trial(what: "PostgreSQL") {
            do {
                var connection = try configuration.connectLikeService(writes: true)
                try Migrator(daemon: Daemon.version).check(&connection)
                return nil
            } catch {
                return "\(error)"
            }
        }
    }

    /// A connection to each server for each certificate, and one for all keys: a key is used in requests only.
    private var apns: [Trial] {
        var options = configuration.clientOptions
        options.answerTimeout = .seconds(10)
        let keys = credentials.filter { $0.kind != LoadedCredential.certificateKind }
        let environments = Environment.allCases
        let ofKeys = environments.filter { environment in
            keys.contains { $0.settings.environments.contains(environment) }
        }
        .map { Self.trial(ConnectionProbe(of: $0, PushIdentity(), options), "\($0.rawValue)") }
        let ofCertificates = credentials.filter { $0.kind == LoadedCredential.certificateKind }.flatMap { credential in
            environments.filter(credential.settings.environments.contains).map { environment in
                Self.trial(
                    ConnectionProbe(of: environment, credential.identity, options),
                    "\(environment.rawValue), with the certificate of credential \(credential.settings.name)")
            }
        }
        return ofKeys + ofCertificates
    }

    private static func trial(_ probe: ConnectionProbe, _ name: String) -> Trial {
        Trial(what: "APNs \(name), \(probe.place)") { probe.failure() }
    }
}
