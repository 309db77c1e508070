public import TokenModel

/// The private key that Apple issues for APNs, an `AuthKey_XXXXXXXXXX.p8`. It signs provider tokens.
///
/// Source: Apple, "Establishing a token-based connection to APNs".
public final class SigningKey: Sendable {
    private let key: PrivateKey
    /// Nil if OpenSSL cannot make it.
    let seal: TokenSeal?

    /// Reads the content of a `.p8` file: unencrypted PKCS#8 in PEM, on the elliptic curve P-256. Never prompts.
    ///
    /// Also reads what is left of such a file after a web form, an environment variable or PowerShell: see `KeyText`.
    ///
    /// - Throws: What was found instead, and what to do.
    public init(p8: SecretBytes) throws(CredentialError) {
        var blocks = PEMBlock.all(in: p8)
        if blocks.isEmpty, let pem = KeyText.pem(in: p8) { blocks = PEMBlock.all(in: pem) }
        let own = blocks.filter(\.isPrivateKey)
        guard let block = own.first else { throw Self.absence(blocks, in: p8) }
        let key = try ErrorQueue.confined { () throws(CredentialError) in try Self.read(block) }
        for block in own.dropFirst() {
            let other = try ErrorQueue.confined { () throws(CredentialError) in try Self.read(block) }
            if !key.isSame(as: other) {
                throw CredentialError(
                    "\(own.count) private keys were found, expected one: nothing says which of them is meant")
            }
        }
        self.key = key
        seal = ErrorQueue.confined { TokenSeal(key) }
    }

    /// The ES256 signature (ECDSA with P-256 and SHA-256): r and s, 32 bytes each.
    ///
    /// - Throws: If OpenSSL fails, for example because it has no memory or random numbers.
    public func sign(_ bytes: [UInt8]) throws(CredentialError) -> [UInt8] {
        try ErrorQueue.confined { () throws(CredentialError) in
            guard let signature = key.signatureES256(of: bytes) else {
                throw CredentialError(
                    "OpenSSL could not sign with the APNs key: try again, and restart if that does not help")
            }
            return signature
        }
    }

    /// Whether a signature as `sign` returns it was made with this key over these bytes.
    func hasSigned(_ bytes: [UInt8], _ signature: [UInt8]) -> Bool {
        ErrorQueue.confined { key.verifiesES256(signature, of: bytes) }
    }

    /// Whether both are the same key, whatever the files look like that they come from.
    public func isSame(as other: SigningKey) -> Bool { key.isSame(as: other.key) }

    private static let wanted = "use the AuthKey_….p8 file of an APNs key, as downloaded from Apple's developer site"

    private static func read(_ block: PEMBlock) throws(CredentialError) -> PrivateKey {
        let key: PrivateKey
        do {
            key = try PrivateKey(pem: block, password: nil)
        } catch .isEncrypted {
            throw CredentialError(
                "the private key is encrypted, expected one without a password: "
                    + "`openssl pkey -in encrypted.p8 -out plain.p8` decrypts it")
        } catch {
            throw CredentialError("the private key is truncated or damaged: \(wanted)")
        }
        guard key.kind == "EC" else {
            throw CredentialError(
                "the private key is \(key.kind), expected EC on the curve P-256: \(wanted)")
        }
        guard let curve = key.curve, curve == "prime256v1" else {
            throw CredentialError(
                "the private key is on the curve \(key.curve ?? "without a name"), expected P-256 (prime256v1): \(wanted)"
            )
        }
        return key
    }

    /// Why no private key was found.
    private static func absence(_ blocks: [PEMBlock], in bytes: SecretBytes) -> CredentialError {
        guard let block = blocks.first else {
            let size =
                bytes.count == 0
                ? "it is empty" : "there is no complete -----BEGIN … to -----END … in its \(bytes.count) bytes"
            return CredentialError("\(KeyText.kind(of: bytes) ?? "no PEM was found, \(size)"): \(wanted)")
        }
        if blocks.contains(where: \.isCertificate) {
            return CredentialError(
                "a certificate was found, expected a private key: \(wanted), or set it as the client certificate")
        }
        if block.label.hasSuffix("PUBLIC KEY") {
            return CredentialError("a public key was found, expected the private one: \(wanted)")
        }
        return CredentialError("no private key was found: \(wanted)")
    }
}

extension SigningKey: CustomStringConvertible {
    public var description: String { "an APNs signing key" }
}
