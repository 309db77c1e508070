internal import APNsFeedback
internal import FoundationEssentials
internal import TokenModel

/// An APNs credential whose files have been read: what a client needs, and what operators see.
struct LoadedCredential: Sendable {
    let settings: CredentialSettings
    let identity: PushIdentity
    /// Nil for a certificate. Credentials with one key have the same one.
    let token: ProviderToken?
    /// `provider token` or `certificate`.
    let kind: String
    /// Nil for a provider token, which is replaced all the time.
    let expiresAt: Instant?
    /// Those that the certificate names; nil for a provider token.
    let certificateEnvironments: Set<Environment>?
    /// The files that hold a key or a password.
    let secretFiles: [String]
    /// What tells one reading of the files from another.
    let files: [String]

    /// Accepts an expired certificate, because the drain must continue. The log and `status` name the certificate.
    ///
    /// - Parameters:
    ///   - folders: The folders in which to look for a file that is named without one. The first folder that has the file wins.
    ///   - tokens: Those of the credentials that were loaded before.
    init(
        _ settings: CredentialSettings, folders: [String], _ tokens: inout ProviderTokens
    ) throws(ConfigurationError) {
        let files = CredentialFiles(settings: settings, folders: folders)
        self.settings = settings
        secretFiles = files.secret
        self.files = files.stamps
        do {
            if let file = settings.keyFile {
                let token = try files.providerToken(signedBy: file, &tokens)
                self.token = token
                identity = PushIdentity(
                    authorization: { try token.text(at: .now) },
                    renew: { (try? token.renew(at: .now, refused: $0)) ?? false })
                kind = "provider token"
                expiresAt = nil
                certificateEnvironments = nil
            } else {
                let certificate = try files.certificate()
                try Self.check(certificate, against: settings)
                token = nil
                identity = PushIdentity(certificateChainPEM: certificate.chainPEM, keyPEM: certificate.keyPEM)
                kind = "certificate"
                expiresAt = certificate.expiresAt
                certificateEnvironments = certificate.environments
            }
        } catch let error as CredentialError {
            let file = files.path(settings.keyFile ?? settings.certificateFile ?? "")
            throw ConfigurationError(["credential.\(settings.name): \(file): \(error.message)"])
        } catch let error as ConfigurationError {
            throw error
        } catch {
            throw ConfigurationError(["credential.\(settings.name): \(error)"])
        }
    }

    /// Checks that the certificate names the topics and environments of its settings: APNs refuses all others.
    private static func check(_ certificate: ClientCertificate, against settings: CredentialSettings) throws {
        let named = certificate.topics
        if let other = settings.topics.first(where: { !$0.hasSuffix("*") && !named.isEmpty && !named.contains($0) }) {
            throw ConfigurationError([
                "credential.\(settings.name): the certificate is for \(named.joined(separator: " ")), and not for the topic \(other)"
            ])
        }
        if certificate.environments.isDisjoint(with: settings.environments) {
            throw ConfigurationError([
                "credential.\(settings.name): the certificate is for \(certificate.environments.map(\.rawValue).joined(separator: " ")) only"
            ])
        }
    }

    /// A likely mistake, in one sentence; nil if there is none.
    var doubt: String? {
        let lacking = certificateEnvironments.map { Set(settings.environments).subtracting($0) } ?? []
        if let other = lacking.first {
            return
                "credential.\(settings.name): the certificate is not for \(other.rawValue): set environment, or APNs refuses what is sent there"
        }
        guard let name = settings.keyFile?.split(separator: "/").last, name.hasPrefix("AuthKey_"), name.hasSuffix(".p8")
        else { return nil }
        let identifier = name.dropFirst(8).dropLast(3)
        if identifier.count != 10 || identifier == settings.keyID { return nil }
        return "credential.\(settings.name): key_id is \(settings.keyID), and its file says \(identifier)"
            + (identifier == settings.teamID ? "; key_id and team_id are exchanged" : "")
    }

    /// The credential as described in `sending_daemon`; contains no secret.
    private struct Described: Encodable {
        var name: String
        var kind: String
        var topics: [String]
        var environments: [String]
        var expiresAt: String?

        enum CodingKeys: String, CodingKey {
            case name, kind, topics, environments
            case expiresAt = "expires_at"
        }
    }

    /// A JSON array that describes the credentials, for `sending_daemon`.
    static func described(_ credentials: [CredentialSource]) -> String {
        let described = credentials.compactMap(\.loaded).map { credential in
            Described(
                name: credential.settings.name, kind: credential.kind, topics: credential.settings.topics,
                environments: credential.settings.environments.map(\.rawValue).sorted(),
                expiresAt: credential.expiresAt.map { ServiceState.text($0.date) })
        }
        return (try? JSONEncoder().encode(described)).map { String(decoding: $0, as: UTF8.self) } ?? "[]"
    }
}

extension LoadedCredential: CustomStringConvertible {
    var description: String {
        "credential \(settings.name): \(kind) for \(settings.topics.joined(separator: " "))"
            + (expiresAt.map { ", expires \(ServiceState.text($0.date))" } ?? "")
    }
}
