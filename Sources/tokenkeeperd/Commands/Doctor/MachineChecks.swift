internal import APNsFeedback
internal import FoundationEssentials
internal import Glibc
internal import TokenLedger
internal import TokenModel

/// The checks that need no database: the files of this machine.
struct MachineChecks {
    let configuration: Configuration
    /// The folders in which the files of credentials are looked for.
    let credentialFolders: [String]

    var findings: [Finding] {
        var findings = configuration.credentials.flatMap(findings(of:))
        if configuration.credentials.isEmpty {
            findings.append(
                Finding(.passed, "credentials", "none is configured: a daemon with these settings does not send"))
        } else {
            findings += [trusted].compactMap(\.self) + runtimeDirectories
        }
        return findings + passwordFiles
    }

    // MARK: - Credentials

    private func findings(of settings: CredentialSettings) -> [Finding] {
        let files = CredentialFiles(settings: settings, folders: credentialFolders)
        let all = [
            settings.keyFile, settings.certificateFile, settings.certificateKeyFile, settings.certificatePasswordFile,
        ].compactMap { $0.map(files.path) }
        if let hidden = all.first(where: Self.isHidden) {
            return [Finding(.notChecked, "credentials", "\(settings.name): needs to read \(hidden): run it as root")]
        }
        let credential: LoadedCredential
        do {
            var tokens = ProviderTokens()
            credential = try LoadedCredential(settings, folders: credentialFolders, &tokens)
        } catch {
            return error.problems.map {
                Finding(
                    .problem, "credentials", $0, fixedBy: ["ls -l /etc/tokenkeeperd/apns", "tokenkeeperd check-config"])
            }
        }
        let open = credential.secretFiles.compactMap(Self.permissions)
        if let expiry = Self.expiry(of: credential, file: files.path(settings.certificateFile ?? ""), at: .now) {
            return [expiry] + open
        }
        return open.isEmpty ? [Finding(.passed, "credentials", "\(credential)")] : open
    }

    /// Whether a file may be there, and this process may not read it. systemd hands such files over to the service.
    private static func isHidden(_ path: String) -> Bool {
        unsafe access(path, R_OK) != 0 && errno == EACCES
    }

    private static func permissions(of path: String) -> Finding? {
        guard let file = SecretFile(path), file.isTooOpen else { return nil }
        return Finding(
            .problem, "permissions", "\(path) holds a secret, and others on this machine can read it",
            fixedBy: [file.cure()])
    }

    /// `status` warns as early.
    static let expiresSoon: Int64 = 30 * 86_400 * 1_000_000

    private static func expiry(of credential: LoadedCredential, file: String, at now: Instant) -> Finding? {
        guard let end = credential.expiresAt, end < now.advanced(byMicroseconds: expiresSoon) else { return nil }
        return Finding(
            .problem, "credentials",
            "the certificate of credential \(credential.settings.name) \(end < now ? "has expired at" : "expires at") "
                + ServiceState.text(end.date) + ": make a new one in Apple's developer account, and replace the file",
            fixedBy: ["install -m 600 NEW-FILE \(ShellWord.quoted(file))", "systemctl restart tokenkeeperd"])
    }

    // MARK: - Other files

    private var trusted: Finding {
        let options = configuration.clientOptions
        let file = options.authorityFile ?? TrustedCertificates.systemFile ?? ""
        guard let fault = TrustedCertificates.fault(of: options) else {
            return Finding(.passed, "trusted certificates", file)
        }
        let isSystems = options.authorityFile == nil
        return Finding(
            .problem, "trusted certificates", "\(fault): no connection to APNs can be made",
            fixedBy: isSystems
                ? ["apt-get install --reinstall ca-certificates", "update-ca-certificates --fresh"]
                : ["ls -l \(ShellWord.quoted(file))"])
    }

    /// Of none, if nothing names one, as for a command outside the service.
    private var runtimeDirectories: [Finding] {
        configuration.runtimeDirectories.map { directory in
            Self.finding(directory, directory.purpose == .runtime ? "runtime directory" : "provider tokens")
        }
    }

    private static func finding(_ directory: RuntimeDirectory, _ subject: String) -> Finding {
        if directory.isOfAnother(than: geteuid()) {
            let words = "\(directory.path) belongs to another user, such as the daemon's: run it as root"
            return Finding(.notChecked, subject, words)
        }
        guard let fault = directory.fault(rootChecks: true) else {
            return Finding(.passed, subject, directory.path)
        }
        let parts = fault.split(separator: "`")
        let word = ShellWord.quoted(directory.path)
        return Finding(
            .problem, subject, fault,
            fixedBy: [parts.count > 1 ? String(parts[1]) : "install -d -m 700 -o tokenkeeperd -g tokenkeeperd \(word)"])
    }

    private var passwordFiles: [Finding] {
        [configuration.address.passwordFile, configuration.values["send.proxy_password_file"]?.value]
            .compactMap { $0.flatMap(Self.permissions) }
    }
}
