internal import COpenSSL
internal import TokenModel

/// The content of a PKCS#12 file: private keys and certificates.
struct KeyArchive {
    /// One or more.
    var keys: [PrivateKey]
    /// The first key's certificate first, if there is one, then the others in the order of the file.
    var certificates: [Certificate]

    /// - Parameters:
    ///   - bytes: The content of a `.p12` or `.pfx` file.
    ///   - password: Nil if there is none. Some programs then write an empty password, others none at all; both are tried.
    init(_ bytes: SecretBytes, password: SecretBytes?) throws(CredentialError) {
        let archive = try PKCS12Handle(bytes)
        if let password, password.contains(0) {
            throw CredentialError(
                "the password of the PKCS#12 file has a NUL character, which no program accepts: correct it")
        }
        guard archive.isOpened(by: password) else {
            if ErrorQueue.takeUnsupportedAlgorithm() { throw Self.oldCipher(in: bytes) }
            throw CredentialError(
                password == nil
                    ? "the PKCS#12 file is protected by a password and none is given: set it"
                    : "the password of the PKCS#12 file is wrong: correct it, or export the file again")
        }
        guard let content = archive.content(password) else {
            if ErrorQueue.takeUnsupportedAlgorithm() { throw Self.oldCipher(in: bytes) }
            throw CredentialError("the PKCS#12 file is damaged: export it again")
        }
        guard let key = content.key else {
            throw CredentialError(
                "the PKCS#12 file has no private key: export the certificate together with its key, "
                    + "in Keychain Access by selecting both")
        }
        keys = [key] + archive.keys(password).filter { !$0.isSame(as: key) }
        certificates = content.certificates
    }

    /// Names the algorithms of the file that OpenSSL 3 disables by default. The file names them in clear text, by identifiers that begin
    /// with 1.2.840.113549.1.12.1 (RFC 7292, appendix C).
    private static func oldCipher(in file: SecretBytes) -> CredentialError {
        // Not wiped: everything secret in the file is encrypted.
        let bytes = file.unprotected
        let names: [UInt8: String] = [1: "RC4-128", 2: "RC4-40", 5: "RC2-128", 6: "RC2-40"]
        let identifier: [UInt8] = [0x06, 0x0a, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x0c, 0x01]
        var found: Set<String> = []
        for place in bytes.indices.dropLast(identifier.count)
        where bytes[place] == 0x06 && bytes[place...].starts(with: identifier) {
            if let name = names[bytes[place + identifier.count]] { found.insert(name) }
        }
        let cipher = found.isEmpty ? "an old algorithm" : found.sorted().joined(separator: " and ")
        return CredentialError(
            "the PKCS#12 file is encrypted with \(cipher), which OpenSSL 3 disables by default: convert it with "
                + "`openssl pkcs12 -legacy -in old.p12 -nodes -out push.pem` and use push.pem, or make a new PKCS#12 file "
                + "from it with `openssl pkcs12 -export -in push.pem -out new.p12`")
    }
}

/// Owns a `PKCS12`.
@safe private struct PKCS12Handle: ~Copyable {
    private let archive: OpaquePointer

    init(_ bytes: SecretBytes) throws(CredentialError) {
        let read: OpaquePointer? = unsafe bytes.withBytes { buffer in
            var place = unsafe buffer.baseAddress?.assumingMemoryBound(to: UInt8.self)
            return unsafe d2i_PKCS12(nil, &place, buffer.count)
        }
        guard let read = unsafe read else {
            let found =
                if !PEMBlock.all(in: bytes).isEmpty {
                    "it is PEM: configure it as PEM"
                } else if Certificate(der: bytes.unprotected) != nil {
                    "it is a certificate without its private key (a .cer): export both together as .p12"
                } else {
                    "it is damaged or of another format: export the certificate and its key as .p12"
                }
            throw CredentialError("the file is not a PKCS#12 file, \(found)")
        }
        unsafe archive = read
    }

    deinit {
        unsafe PKCS12_free(archive)
    }

    /// Whether the password matches the file's checksum. A file without a checksum accepts any password.
    func isOpened(by password: SecretBytes?) -> Bool {
        guard unsafe PKCS12_mac_present(archive) == 1 else { return true }
        guard let password, password.count > 0 else {
            return unsafe PKCS12_verify_mac(archive, nil, 0) == 1 || PKCS12_verify_mac(archive, "", 0) == 1
        }
        return unsafe password.withCString { unsafe PKCS12_verify_mac(archive, $0, -1) == 1 }
    }

    /// All keys of the file. PKCS12_parse finds the first one only.
    func keys(_ password: SecretBytes?) -> [PrivateKey] {
        var keys: [PrivateKey] = []
        unsafe (password ?? SecretBytes([])).withCString { text in
            while let key = unsafe tk_archived_key(archive, text, CInt(keys.count)) {
                unsafe keys.append(PrivateKey(owning: key))
            }
        }
        return keys
    }

    /// Nil if the file is malformed or cannot be decrypted.
    func content(_ password: SecretBytes?) -> (key: PrivateKey?, certificates: [Certificate])? {
        var key: OpaquePointer?
        var own: OpaquePointer?
        var others: OpaquePointer?
        let isRead = unsafe (password ?? SecretBytes([])).withCString {
            unsafe PKCS12_parse(archive, $0, &key, &own, &others) == 1
        }
        guard isRead else { return nil }
        defer { unsafe tk_free_certificates(others) }
        var certificates: [Certificate] = []
        if let own = unsafe own { unsafe certificates.append(Certificate(owning: own)) }
        while unsafe tk_certificate_count(others) > 0, let next = unsafe tk_take_certificate(others) {
            unsafe certificates.append(Certificate(owning: next))
        }
        return (key: unsafe key.map { unsafe PrivateKey(owning: $0) }, certificates)
    }
}
