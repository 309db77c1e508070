internal import APNsFeedback
internal import FoundationEssentials
internal import Glibc
internal import TokenModel

/// The files of a credential.
struct CredentialFiles {
    let settings: CredentialSettings
    /// The folders in which to look for a file that is named without one. The first folder that has the file wins.
    let folders: [String]

    func path(_ name: String) -> String {
        if name.hasPrefix("/") { return name }
        return folders.map { $0 + name }.first { FileManager.default.fileExists(atPath: $0) }
            ?? (folders.last ?? "") + name
    }

    /// The paths of the files that hold a key or a password.
    var secret: [String] {
        // A certificate whose key is in another file is public.
        let certificate = settings.certificateKeyFile == nil ? settings.certificateFile : nil
        return [settings.keyFile, certificate, settings.certificateKeyFile, settings.certificatePasswordFile]
            .compactMap { $0.map(path) }
    }

    /// For each file, what changes when it is replaced: its inode, size and time, or that it cannot be read.
    var stamps: [String] {
        [settings.keyFile, settings.certificateFile, settings.certificateKeyFile, settings.certificatePasswordFile]
            .compactMap { $0.map(path) }.map { path in
                var file = stat()
                guard unsafe stat(path, &file) == 0 else { return "\(path) -" }
                return
                    "\(path) \(file.st_ino) \(file.st_size) \(file.st_mtim.tv_sec).\(file.st_mtim.tv_nsec) \(file.st_ctim.tv_sec).\(file.st_ctim.tv_nsec)"
            }
    }

    func providerToken(signedBy file: String, _ tokens: inout ProviderTokens) throws -> ProviderToken {
        try tokens.token(
            of: SigningKey(p8: try bytes(file, of: "key_file")), keyID: settings.keyID, teamID: settings.teamID)
    }

    func certificate() throws -> ClientCertificate {
        let password = try settings.certificatePasswordFile.map {
            try bytes($0, of: "certificate_password_file").firstLine
        }
        let contents = KeyText.plain(try bytes(settings.certificateFile ?? "", of: "certificate_file"))
        let environments = Set(settings.environments)
        guard Self.isPEM(contents) else {
            return try ClientCertificate(
                pkcs12: contents, password: password, at: nil, for: settings.topics, in: environments)
        }
        let key = try settings.certificateKeyFile.map { KeyText.plain(try bytes($0, of: "certificate_key_file")) }
        return try ClientCertificate(
            pem: contents, key: key, password: password, at: nil, for: settings.topics, in: environments)
    }

    private func bytes(_ name: String, of key: String) throws(ConfigurationError) -> SecretBytes {
        do {
            return try SecretBytes(contentsOf: path(name))
        } catch {
            throw ConfigurationError(["credential.\(settings.name).\(key): \(path(name)) cannot be read: \(error)"])
        }
    }

    /// The first block may follow other text: `openssl pkcs12` writes some before it.
    private static func isPEM(_ contents: SecretBytes) -> Bool {
        let mark = Array("-----BEGIN".utf8)
        return unsafe contents.withBytes { bytes in
            // DER contains NULs.
            unsafe !bytes.contains(0)
                && bytes.indices.contains { unsafe bytes[$0...].starts(with: mark) }
        }
    }
}
