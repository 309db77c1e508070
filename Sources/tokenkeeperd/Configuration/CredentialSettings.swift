internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// The settings of one APNs credential: the section `[credential.NAME]`.
struct CredentialSettings: Equatable, Sendable {
    let name: String
    /// Nil for a certificate.
    let keyFile: String?
    let keyID: String
    let teamID: String
    let certificateFile: String?
    let certificateKeyFile: String?
    let certificatePasswordFile: String?
    /// Topics, and beginnings of topics followed by `*`.
    let topics: [String]
    let environments: Set<Environment>

    private init(_ name: String, _ values: [String: Configuration.Resolved]) {
        func value(_ key: String) -> String? { values["credential.\(name).\(key)"]?.value }
        self.name = name
        keyFile = value("key_file")
        keyID = value("key_id") ?? ""
        teamID = value("team_id") ?? ""
        certificateFile = value("certificate_file")
        certificateKeyFile = value("certificate_key_file")
        certificatePasswordFile = value("certificate_password_file")
        topics = (value("topics") ?? "").split(separator: " ").map(String.init)
        environments = Environment(rawValue: value("environment") ?? "both").map { [$0] } ?? Set(Environment.allCases)
    }

    /// The same for all credentials that prove themselves with the same key.
    var key: String { keyFile == nil ? name : "\(teamID)/\(keyID)" }

    /// The settings of all credentials, sorted by name.
    static func all(in values: [String: Configuration.Resolved]) -> [CredentialSettings] {
        Set(
            values.keys.compactMap { key -> String? in
                let parts = key.split(separator: ".")
                return parts.count == 3 && parts[0] == "credential" ? String(parts[1]) : nil
            }
        ).sorted().map { CredentialSettings($0, values) }
    }

    /// Adds a problem for each setting that is missing, superfluous or contradictory.
    static func addProblems(
        in values: [String: Configuration.Resolved], to problems: inout ConfigurationProblems
    ) {
        // The first credential that has a topic. Comparing every topic with every other would take quadratic time.
        var holders: [Environment: [String: String]] = [:]
        for credential in all(in: values) {
            let place = "credential.\(credential.name)"
            switch (credential.keyFile, credential.certificateFile) {
            case (nil, nil): problems.add("\(place): expected key_file or certificate_file")
            case (_?, _?): problems.add("\(place): has key_file and certificate_file, expected one of them")
            case (_?, nil):
                if credential.keyID.isEmpty { problems.add("\(place): key_file is set, expected key_id too") }
                if credential.teamID.isEmpty { problems.add("\(place): key_file is set, expected team_id too") }
            case (nil, _?): break
            }
            if credential.topics.isEmpty { problems.add("\(place): expected topics, such as \"com.example.app\"") }
            for topic in credential.topics where topic.dropLast().contains("*") {
                problems.add("\(place): topics has \(ConfigurationProblems.cut(topic)), expected * at the end only")
            }
            for topic in credential.topics {
                let others = Set(credential.environments.compactMap { holders[$0]?[topic] }).subtracting([
                    credential.name
                ])
                for other in others.sorted() {
                    problems.add(
                        "\(place): topics has \(ConfigurationProblems.cut(topic)), and so does credential.\(other): keep one, or set environment in both"
                    )
                }
                for environment in credential.environments where holders[environment]?[topic] == nil {
                    holders[environment, default: [:]][topic] = credential.name
                }
            }
        }
    }

    /// The credential that fits a topic best; nil if none fits.
    static func best(of credentials: [CredentialSettings], for scope: TopicScope) -> CredentialSettings? {
        var best: (credential: CredentialSettings, fit: Int)?
        for credential in credentials {
            guard let fit = credential.fit(scope) else { continue }
            if fit > best?.fit ?? -1 { best = (credential, fit) }
        }
        return best?.credential
    }

    /// How well the credential fits a topic: the length of the longest match. Nil if it does not cover the topic.
    func fit(_ scope: TopicScope) -> Int? {
        guard environments.contains(where: { $0.rawValue == scope.environment }) else { return nil }
        return topics.compactMap { pattern in
            if pattern == scope.topic { return Int.max }
            return pattern.hasSuffix("*") && scope.topic.hasPrefix(pattern.dropLast()) ? pattern.count : nil
        }.max()
    }
}
