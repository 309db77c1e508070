internal import COpenSSL
internal import TokenModel

/// A private key of any kind. Owns the `EVP_PKEY`; the pointer never leaves this folder.
///
/// Sendable: nothing changes the key after `init`, and OpenSSL allows any number of threads to use such an object at once
/// (openssl-threads(7)).
@safe final class PrivateKey: @unchecked Sendable {
    private let key: OpaquePointer

    /// Takes ownership of a key.
    init(owning key: OpaquePointer) {
        unsafe self.key = key
    }

    deinit {
        unsafe EVP_PKEY_free(key)
    }

    /// Why a PEM could not be read.
    enum Fault: Error {
        /// The key is encrypted, and no password is given.
        case isEncrypted
        /// The key is encrypted with another password.
        case wrongPassword
        /// The key is encrypted with an algorithm that OpenSSL disables.
        case unsupportedCipher
        case isBroken
    }

    /// The key of one PEM block. Never prompts.
    convenience init(pem block: PEMBlock, password: SecretBytes?) throws(Fault) {
        var wasAsked = false
        let none = SecretBytes([])
        let read: OpaquePointer? = unsafe block.text.withBytes { text in
            unsafe (password ?? none).withCString { bytes in
                var given = unsafe tk_password(
                    bytes: password == nil ? nil : bytes, count: CInt(password?.count ?? 0), was_asked: 0)
                defer { unsafe wasAsked = given.was_asked != 0 }
                return unsafe tk_private_key(text.baseAddress, CInt(text.count), &given)
            }
        }
        if let read = unsafe read {
            unsafe self.init(owning: read)
            return
        }
        let isUnsupported = ErrorQueue.takeUnsupportedAlgorithm()
        guard wasAsked else { throw .isBroken }
        if password == nil { throw .isEncrypted }
        throw isUnsupported ? .unsupportedCipher : .wrongPassword
    }

    /// `EC`, `RSA`, …
    var kind: String {
        unsafe EVP_PKEY_get0_type_name(key).map { unsafe String(cString: $0) } ?? "unknown"
    }

    /// OpenSSL's name of an EC key's curve, `prime256v1` for P-256. Nil for other kinds, and for a curve without a name.
    var curve: String? {
        var length = 0
        var name = [UInt8](repeating: 0, count: 80)
        let isKnown = unsafe name.withUnsafeMutableBytes { buffer in
            unsafe EVP_PKEY_get_group_name(key, buffer.baseAddress, buffer.count, &length)
        }
        return isKnown == 1 ? String(decoding: name.prefix(length), as: UTF8.self) : nil
    }

    /// Whether both are the same key, whatever the files look like that they come from.
    func isSame(as other: PrivateKey) -> Bool {
        unsafe EVP_PKEY_eq(key, other.key) == 1
    }

    /// Whether this is the key of a certificate.
    func belongs(to certificate: OpaquePointer) -> Bool {
        unsafe X509_check_private_key(certificate, key) == 1
    }

    /// The private number of a key on P-256, 32 bytes; nil for another key, or if OpenSSL fails.
    var secretNumber: SecretBytes? {
        var number: OpaquePointer?
        guard unsafe EVP_PKEY_get_bn_param(key, OSSL_PKEY_PARAM_PRIV_KEY, &number) == 1 else { return nil }
        defer { unsafe BN_clear_free(number) }
        var written: CInt = 0
        let bytes = unsafe SecretBytes(count: 32) { memory in
            unsafe written = BN_bn2binpad(number, memory.baseAddress?.assumingMemoryBound(to: UInt8.self), 32)
        }
        return written == 32 ? bytes : nil
    }

    /// The key as unencrypted PKCS#8 in PEM; nil if OpenSSL cannot write it.
    var pem: SecretBytes? {
        guard let information = unsafe EVP_PKEY2PKCS8(key) else { return nil }
        defer { unsafe PKCS8_PRIV_KEY_INFO_free(information) }
        let length = unsafe i2d_PKCS8_PRIV_KEY_INFO(information, nil)
        guard length > 0 else { return nil }
        var written: CInt = 0
        let content = unsafe SecretBytes(count: Int(length)) { memory in
            var place = unsafe memory.baseAddress?.assumingMemoryBound(to: UInt8.self)
            unsafe written = i2d_PKCS8_PRIV_KEY_INFO(information, &place)
        }
        guard written == length else { return nil }
        return PEMBlock.text(label: "PRIVATE KEY", content: content)
    }

    /// The ECDSA signature of the message's SHA-256: r and s, 32 bytes each with leading zeros, as JWS requires (RFC 7518, 3.4).
    /// OpenSSL itself writes DER, without leading zeros. The key must be on P-256. Nil if OpenSSL fails.
    func signatureES256(of message: [UInt8]) -> [UInt8]? {
        guard let context = unsafe EVP_MD_CTX_new() else { return nil }
        defer { unsafe EVP_MD_CTX_free(context) }
        guard unsafe EVP_DigestSignInit(context, nil, EVP_sha256(), nil, key) == 1 else { return nil }
        var der = unsafe [UInt8](repeating: 0, count: Int(EVP_PKEY_get_size(key)))
        var length = der.count
        guard unsafe EVP_DigestSign(context, &der, &length, message, message.count) == 1 else { return nil }

        let parsed: OpaquePointer? = unsafe der.withUnsafeBufferPointer { buffer in
            var place = buffer.baseAddress
            return unsafe d2i_ECDSA_SIG(nil, &place, length)
        }
        guard let signature = unsafe parsed else { return nil }
        defer { unsafe ECDSA_SIG_free(signature) }
        var both = [UInt8](repeating: 0, count: 64)
        let isWritten = unsafe both.withUnsafeMutableBufferPointer { buffer in
            guard let start = buffer.baseAddress else { return false }
            return unsafe BN_bn2binpad(ECDSA_SIG_get0_r(signature), start, 32) == 32
                && BN_bn2binpad(ECDSA_SIG_get0_s(signature), start + 32, 32) == 32
        }
        return isWritten ? both : nil
    }

    /// Whether a signature was made with this key over the message: the form of `signatureES256`.
    func verifiesES256(_ signature: [UInt8], of message: [UInt8]) -> Bool {
        guard signature.count == 64, let parsed = unsafe ECDSA_SIG_new() else { return false }
        defer { unsafe ECDSA_SIG_free(parsed) }
        let r = unsafe BN_bin2bn(Array(signature.prefix(32)), 32, nil)
        let s = unsafe BN_bin2bn(Array(signature.suffix(32)), 32, nil)
        guard let r = unsafe r, let s = unsafe s, unsafe ECDSA_SIG_set0(parsed, r, s) == 1 else {
            unsafe BN_free(r)
            unsafe BN_free(s)
            return false
        }
        var der = [UInt8](repeating: 0, count: 80)
        let length = unsafe der.withUnsafeMutableBufferPointer { buffer in
            var place = buffer.baseAddress
            return unsafe i2d_ECDSA_SIG(parsed, &place)
        }
        guard length > 0, let context = unsafe EVP_MD_CTX_new() else { return false }
        defer { unsafe EVP_MD_CTX_free(context) }
        return unsafe EVP_DigestVerifyInit(context, nil, EVP_sha256(), nil, key) == 1
            && EVP_DigestVerify(context, der, Int(length), message, message.count) == 1
    }
}
