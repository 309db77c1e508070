internal import TokenModel

/// The part that an operator sees.
extension ResponseEvidence {
    /// One for each subject that pauses, is tried, or was refused only, in order.
    func problems(
        except others: some Sequence<CredentialScope>, at now: ContinuousClock.Instant
    ) -> [WaitingProblem] {
        let others = Set(others.map(Subject.server))
        let shown = standings.compactMapValues { $0.shown(after: timing.unanswered, at: now) }
            .filter { !others.contains($0.key) }
        return shown.sorted { $0.key < $1.key }.compactMap { subject, cause in
            // A topic does not repeat what its credential says.
            if case .topic = subject, let scope = standings[subject]?.scope, shown[.server(scope)]?.words == cause.words
            {
                return nil
            }
            return problem(of: subject, cause)
        }
    }

    /// Why a subject pauses, in words.
    func words(of subject: Subject) -> String {
        standings[subject]?.pause.map { problem(of: subject, $0.cause).words } ?? ""
    }

    private func problem(of subject: Subject, _ cause: Standing.Cause) -> WaitingProblem {
        let (before, who, after) =
            switch (subject, cause.kind) {
            case (.topic(let topic), .message): ("APNs refuses the messages of ", "\(topic)", "")
            case (.topic(let topic), .server), (.topic(let topic), .foreign): ("requests for ", "\(topic)", " fail")
            case (.topic(let topic), _): ("APNs refuses requests of ", "\(topic)", "")
            case (.server(let scope), .sender) where cause.words.hasPrefix("APNs"):
                ("APNs refuses the credential (", "\(scope)", ")")
            case (.server(let scope), .sender): ("the credential cannot be used (", "\(scope)", ")")
            case (.server(let scope), .foreign):
                (
                    "something between this daemon and APNs responds (", "\(scope)",
                    "); check send.\(scope.environment)_server and any proxy"
                )
            case (.server(let scope), _): ("APNs returns errors or cannot be reached (", "\(scope)", ")")
            }
        let words = cause.words.isEmpty ? "no connection takes them" : cause.words
        return WaitingProblem(before, who, "\(after), and requests wait: \(words)\(Self.help(words))")
    }

    /// What usually helps after a reason of APNs.
    static func help(_ words: String) -> String {
        switch words.split(separator: " ").last {
        case "InvalidProviderToken":
            "; usually key_id and team_id are exchanged, or the key was revoked or is another one than key_id says"
        case "ExpiredProviderToken": "; check the clock of this machine"
        case "TooManyProviderTokenUpdates":
            "; another host or program makes provider tokens of this key, too"
        case "BadEnvironmentKeyIdInToken", "BadEnvironmentKeyInToken", "BadCertificateEnvironment":
            "; the key or certificate is for the other environment only"
        case "TopicDisallowed": "; the key or certificate is for other topics only"
        default: ""
        }
    }
}
