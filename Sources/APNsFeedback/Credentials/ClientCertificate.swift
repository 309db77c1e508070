import FoundationEssentials
public import TokenModel

/// An APNs certificate with its private key: it identifies a provider in the TLS handshake.
///
/// Source: Apple, "Establishing a certificate-based connection to APNs".
public struct ClientCertificate: Sendable {
    /// The certificate, followed by the other certificates of its file, in PEM: `CURLOPT_SSLCERT_BLOB`.
    public let chainPEM: [UInt8]
    /// The private key as unencrypted PKCS#8 in PEM: `CURLOPT_SSLKEY_BLOB`.
    public let keyPEM: SecretBytes
    public let validFrom: Instant
    /// Apple's certificates are valid for 13 months.
    public let expiresAt: Instant
    /// The common name of the subject, such as `Apple Push Services: com.example.app`; empty if there is none.
    public let name: String
    /// The topics that the certificate is for: from Apple's extensions 1.2.840.113635.100.6.3.6 and .4, or otherwise the UID of
    /// the subject. Empty if the certificate names none, which does not mean that it is for all topics.
    public let topics: [String]
    /// From Apple's extensions 1.2.840.113635.100.6.3.1 (sandbox) and .2 (production); both environments if it has neither.
    public let environments: Set<Environment>

    /// Reads PEM. Never prompts.
    ///
    /// - Parameters:
    ///   - pem: The certificate and its issuers' certificates, in any order; also the key if `key` is nil.
    ///   - key: The private key, if it has a file of its own.
    ///   - password: The password of the private key; ignored if the key is not encrypted.
    ///   - now: The time of day; nil to accept an expired certificate.
    ///   - topics: Of several identities in the file, one for these topics, for these environments and valid today is taken. May have wildcards.
    /// - Throws: What is wrong: no certificate or no key, a missing or wrong password, the key of another certificate, or a certificate
    ///   that is not valid now.
    public init(
        pem: SecretBytes, key: SecretBytes? = nil, password: SecretBytes? = nil, at now: Instant?,
        for topics: [String] = [], in environments: Set<Environment> = []
    ) throws(CredentialError) {
        self = try ErrorQueue.confined { () throws(CredentialError) in
            let blocks = PEMBlock.all(in: pem)
            let certificates = try Self.certificates(of: blocks, in: pem)
            let keys = try Self.keys(of: key.map { PEMBlock.all(in: $0) } ?? blocks, password: password)
            return try Self.best(of: keys, certificates, at: now, for: topics, in: environments)
        }
    }

    /// Reads PKCS#12.
    ///
    /// - Parameters:
    ///   - pkcs12: The content of a `.p12` or `.pfx` file.
    ///   - password: Nil if there is none.
    ///   - now: The time of day; nil to accept an expired certificate.
    /// - Throws: What is wrong, as with PEM. For encryption that OpenSSL 3 disables by default (mostly RC2-40), the commands that
    ///   convert the file.
    public init(
        pkcs12: SecretBytes, password: SecretBytes?, at now: Instant?, for topics: [String] = [],
        in environments: Set<Environment> = []
    ) throws(CredentialError) {
        self = try ErrorQueue.confined { () throws(CredentialError) in
            let archive = try KeyArchive(pkcs12, password: password)
            return try Self.best(of: archive.keys, archive.certificates, at: now, for: topics, in: environments)
        }
    }

    /// Of the identities that keys and certificates make, one for these topics, or else valid today, or else for these environments, or else for production; of
    /// several, the one that is valid for longest. Keychain Access exports an old and a renewed certificate, or those of both environments, into one file.
    private static func best(
        of keys: [PrivateKey], _ certificates: [Certificate], at now: Instant?, for topics: [String],
        in environments: Set<Environment>
    ) throws(CredentialError) -> ClientCertificate {
        var identities: [ClientCertificate] = []
        for key in keys {
            for certificate in certificates where certificate.isOf(key) {
                let others = certificates.filter { $0 !== certificate }
                if let identity = try? Self(key, [certificate] + others, at: nil) { identities.append(identity) }
            }
        }
        func rank(_ identity: ClientCertificate) -> Int {
            let fits =
                identity.topics.isEmpty
                || topics.allSatisfy { topic in
                    topic.hasSuffix("*")
                        ? identity.topics.contains { $0.hasPrefix(topic.dropLast()) } : identity.topics.contains(topic)
                }
            let isForAll = environments.isSubset(of: identity.environments)
            let isValid = (try? identity.requireValidity(at: now ?? .now)) != nil
            let isOfProduction = identity.environments.contains(.production)
            return (fits ? 8 : 0) + (isValid ? 4 : 0) + (isForAll ? 2 : 0) + (isOfProduction ? 1 : 0)
        }
        // One that is complete, or the reason why none is.
        guard let best = identities.max(by: { (rank($0), $0.expiresAt) < (rank($1), $1.expiresAt) }) else {
            return try Self(keys[0], certificates, at: now)
        }
        if let now { try best.requireValidity(at: now) }
        return best
    }

    /// Checks the validity at an instant. Check again from time to time: a daemon may run longer than a certificate is valid.
    ///
    /// - Throws: The date, if the certificate has expired or is not valid yet.
    public func requireValidity(at now: Instant) throws(CredentialError) {
        if now > expiresAt {
            throw CredentialError(
                "the certificate '\(name)' expired at \(Self.text(expiresAt)): create a new one at Apple's developer site"
            )
        }
        if now < validFrom {
            throw CredentialError(
                "the certificate '\(name)' is not valid before \(Self.text(validFrom)): check the clock of this machine, "
                    + "it is now \(Self.text(now))")
        }
    }

    private init(_ key: PrivateKey, _ certificates: [Certificate], at now: Instant?) throws(CredentialError) {
        guard let first = certificates.first else {
            throw CredentialError("found a private key without a certificate: export both together")
        }
        guard let own = certificates.first(where: { $0.isOf(key) }) else {
            throw CredentialError(
                "the private key does not belong to the certificate '\(Self.name(of: first))': use the key that its request "
                    + "was made with")
        }
        guard let validFrom = own.validFrom, let expiresAt = own.expiresAt, let keyPEM = key.pem else {
            throw CredentialError("the certificate '\(Self.name(of: own))' or its key is malformed: export both again")
        }
        name = Self.name(of: own)
        self.validFrom = validFrom
        self.expiresAt = expiresAt
        self.keyPEM = keyPEM
        chainPEM = ([own] + certificates.filter { $0 !== own }).flatMap { $0.pem ?? [] }
        // A certificate may have both extensions, with the same topics.
        let lists = [PushExtension.topics, PushExtension.voipTopics].compactMap { own.content(ofExtension: $0) }
        var listed: [String] = []
        for topic in lists.flatMap(PushExtension.topics) where !listed.contains(topic) { listed.append(topic) }
        topics = listed.isEmpty ? own.userIDs : listed
        var environments: Set<Environment> = []
        if own.content(ofExtension: PushExtension.development) != nil { environments.insert(.sandbox) }
        if own.content(ofExtension: PushExtension.production) != nil { environments.insert(.production) }
        self.environments = environments.isEmpty ? Set(Environment.allCases) : environments
        if let now { try requireValidity(at: now) }
    }

    private static func certificates(of blocks: [PEMBlock], in pem: SecretBytes) throws(CredentialError)
        -> [Certificate]
    {
        var certificates: [Certificate] = []
        for block in blocks where block.isCertificate {
            guard let certificate = block.content.flatMap({ Certificate(der: $0) }) else {
                throw CredentialError("certificate \(certificates.count + 1) of the PEM is damaged: export it again")
            }
            certificates.append(certificate)
        }
        if certificates.isEmpty {
            throw CredentialError(
                blocks.isEmpty
                    ? "no PEM was found: use a file with -----BEGIN CERTIFICATE-----, or set a .p12 file as PKCS#12"
                    : "the PEM has no certificate: add the one that Apple issued; "
                        + "`openssl x509 -inform der -in aps.cer` converts it to PEM")
        }
        return certificates
    }

    /// - Returns: One or more.
    private static func keys(of blocks: [PEMBlock], password: SecretBytes?) throws(CredentialError) -> [PrivateKey] {
        let keys = blocks.filter(\.isPrivateKey)
        guard let first = keys.first else {
            throw CredentialError("the PEM has no private key: add the key, or name its file")
        }
        let read = keys.compactMap { try? key(of: $0, password: password) }
        return read.isEmpty ? [try key(of: first, password: password)] : read
    }

    private static func key(of block: PEMBlock, password: SecretBytes?) throws(CredentialError) -> PrivateKey {
        do {
            return try PrivateKey(pem: block, password: password)
        } catch {
            switch error {
            case .isEncrypted: throw CredentialError("the private key is encrypted and no password is given: set it")
            case .wrongPassword: throw CredentialError("the password of the private key is wrong: correct it")
            case .unsupportedCipher:
                throw CredentialError(
                    "the private key is encrypted with an algorithm that OpenSSL 3 disables by default: "
                        + "`openssl pkey -provider legacy -provider default -in old.pem -aes256 -out new.pem` converts it"
                )
            case .isBroken: throw CredentialError("the private key is damaged: export it again")
            }
        }
    }

    /// Logs show the name, so it has no control characters.
    private static func name(of certificate: Certificate) -> String {
        var name = ""
        for scalar in (certificate.commonNames.first ?? "").unicodeScalars {
            name.unicodeScalars.append(scalar.properties.generalCategory == .control ? "?" : scalar)
        }
        return name
    }

    private static func text(_ instant: Instant) -> String {
        Date(timeIntervalSince1970: Double(instant.microseconds) / 1_000_000).formatted(.iso8601)
    }
}

extension ClientCertificate: CustomStringConvertible {
    /// Does not contain the key.
    public var description: String { "the certificate '\(name)', valid until \(Self.text(expiresAt))" }
}
