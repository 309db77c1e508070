internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// What the pipeline does for its credentials and clients besides sending.
extension SendPipeline {
    /// Looks for servers that blame the sender, and for notices, and logs what is new.
    mutating func reportFaults() {
        summary.report(notices: notices)
        for sender in senders {
            for (environment, fault) in sender.client.state.faults {
                let scope = CredentialScope(
                    credential: sender.credential.settings.name, environment: environment.rawValue)
                if faults.take(fault, of: scope, at: .now) { summary.blamed(scope, fault.goAway) }
            }
        }
    }

    /// Reads the files of the credentials that have changed, and tries the new content at once.
    ///
    /// - Returns: Whether anything is new.
    mutating func refreshCredentials() -> Bool {
        let renewed = senders.filter { $0.credential.refresh() }
        for sender in renewed {
            summary.renewed(sender.credential)
            for environment in sender.credential.settings.environments { sender.client.reconnect(environment) }
            state.resume(credential: sender.credential.settings.name)
        }
        return !renewed.isEmpty
    }

    /// Notes whether APNs accepts the current provider token: then other daemons may have it.
    func judge(_ token: ProviderToken, by outcomes: [PushOutcome]) {
        let awaitsProof = token.awaitsProof
        for outcome in outcomes {
            guard let text = outcome.authorization, case .answered(let answer) = outcome.end else { continue }
            switch answer.status {
            case 200, 410: if awaitsProof, Interpretation.isOfAPNs(answer) { token.was(accepted: true, text) }
            case 429: if answer.reason == "TooManyProviderTokenUpdates" { token.was(accepted: false, text) }
            default: break
            }
        }
    }

    /// Takes the provider tokens of other daemons, and gives them those that APNs has accepted from this one.
    mutating func shareTokens(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        // Credentials may have one key. Of two keys with one identifier, one is wrong.
        let tokens = Array(
            Dictionary(senders.compactMap(\.credential.loaded?.token).map { ($0.key, $0) }) { $0.awaitsProof ? $1 : $0 }
                .values)
        if tokens.isEmpty { return }
        try attempt("share provider tokens", on: &connection) { _, connection throws(DatabaseError) in
            try outbox.exchangeTokens(on: &connection) { shared in
                ProviderTokens.take(shared, tokens)
                return tokens.compactMap { $0.toShare(insteadOf: shared[$0.key], at: .now) }
            }
        }
        for token in tokens { token.keep() }
    }

    mutating func tryOtherEnvironment(after outcome: PushOutcome) {
        guard let topic = OtherEnvironment.topic(toTryAfter: outcome), let credential = choice.name(for: topic),
            let sender = sendersByName[credential],
            // A certificate may be for one environment only.
            sender.credential.settings.keyFile != nil, !state.isOnTrial(topic),
            let request = otherEnvironment.trial(after: outcome, at: .now)
        else { return }
        sender.client.submit([request])
    }
}
