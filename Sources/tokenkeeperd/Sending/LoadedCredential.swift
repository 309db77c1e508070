internal import APNsFeedback
internal import FoundationEssentials
internal import TokenModel

/// A credential of APNs with its files read: what a client needs, and what people are told of it.
struct LoadedCredential: Sendable {
    let settings: CredentialSettings
    let identity: PushIdentity
    /// `provider token` or `certificate`.
    let kind: String
    /// Nil for a provider token, which is made anew again and again.
    let expiresAt: Instant?
    /// The files of it that hold a key or a password.
    let secretFiles: [String]

    /// A certificate that has expired is taken, and told of: the drain goes on all the same.
    ///
    /// - Parameter folders: Where a file is looked for that is named without a folder, the first that has it.
    init(_ settings: CredentialSettings, folders: [String]) throws(ConfigurationError) {
        self.settings = settings
        func path(_ name: String) -> String {
            if name.hasPrefix("/") { return name }
            return folders.map { $0 + name }.first { FileManager.default.fileExists(atPath: $0) }
                ?? (folders.last ?? "") + name
        }
        func bytes(_ name: String, of key: String) throws(ConfigurationError) -> SecretBytes {
            guard let bytes = SecretBytes(contentsOf: path(name)) else {
                throw ConfigurationError(["credential.\(settings.name).\(key): \(path(name)) cannot be read"])
            }
            return bytes
        }
        // A certificate with its key in a file of its own is public.
        let certificate = settings.certificateKeyFile == nil ? settings.certificateFile : nil
        secretFiles = [
            settings.keyFile, certificate, settings.certificateKeyFile, settings.certificatePasswordFile,
        ].compactMap { $0.map(path) }
        do {
            if let file = settings.keyFile {
                let token = try ProviderToken(
                    key: SigningKey(p8: try bytes(file, of: "key_file")), keyID: settings.keyID, teamID: settings.teamID
                )
                identity = PushIdentity(
                    authorization: { try token.text(at: .now) },
                    renew: { (try? token.renew(at: .now, refused: $0)) ?? false })
                kind = "provider token"
                expiresAt = nil
            } else {
                let file = settings.certificateFile ?? ""
                var password: SecretBytes?
                if let file = settings.certificatePasswordFile {
                    password = try bytes(file, of: "certificate_password_file").firstLine
                }
                let contents = try bytes(file, of: "certificate_file")
                let certificate =
                    if Self.isPEM(contents) {
                        try ClientCertificate(
                            pem: contents,
                            key: try settings.certificateKeyFile.map { try bytes($0, of: "certificate_key_file") },
                            password: password, at: nil)
                    } else {
                        try ClientCertificate(pkcs12: contents, password: password, at: nil)
                    }
                try Self.check(certificate, against: settings)
                identity = PushIdentity(certificateChainPEM: certificate.chainPEM, keyPEM: certificate.keyPEM)
                kind = "certificate"
                expiresAt = certificate.expiresAt
            }
        } catch let error as CredentialError {
            throw ConfigurationError([
                "credential.\(settings.name): \(path(settings.keyFile ?? settings.certificateFile ?? "")): \(error.message)"
            ])
        } catch let error as ConfigurationError {
            throw error
        } catch {
            throw ConfigurationError(["credential.\(settings.name): \(error)"])
        }
    }

    /// A certificate is good for what is named in it: APNs would refuse the rest, and pause the topic.
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

    /// `openssl pkcs12` writes words before the first block.
    private static func isPEM(_ contents: SecretBytes) -> Bool {
        let mark = Array("-----BEGIN".utf8)
        return unsafe contents.withBytes { bytes in
            // DER has NULs.
            unsafe !bytes.contains(0)
                && bytes.indices.contains { unsafe bytes[$0...].starts(with: mark) }
        }
    }

    /// What is told of it, to `sending_daemon`; no secret is in it.
    private struct Told: Encodable {
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

    /// A JSON array of what is told of several.
    static func told(_ credentials: [LoadedCredential]) -> String {
        let told = credentials.map { credential in
            Told(
                name: credential.settings.name, kind: credential.kind, topics: credential.settings.topics,
                environments: credential.settings.environments.map(\.rawValue).sorted(),
                expiresAt: credential.expiresAt.map { ServiceState.text($0.date) })
        }
        return (try? JSONEncoder().encode(told)).map { String(decoding: $0, as: UTF8.self) } ?? "[]"
    }
}

extension LoadedCredential: CustomStringConvertible {
    var description: String {
        "credential \(settings.name): \(kind) for \(settings.topics.joined(separator: " "))"
            + (expiresAt.map { ", expires \(ServiceState.text($0.date))" } ?? "")
    }
}
