internal import COpenSSL
internal import FoundationEssentials
internal import TokenModel

/// Encrypts provider tokens, so that only who has the signing key can read them: AES-256-GCM (NIST SP 800-38D), with a key that is the HMAC-SHA-256
/// of a constant under the private number of the signing key.
struct TokenSeal: Sendable {
    private let key: SecretBytes

    private static let (nonceLength, tagLength) = (12, 16)

    /// Nil if OpenSSL fails, or if the key is not on P-256.
    init?(_ signingKey: PrivateKey) {
        guard let secret = signingKey.secretNumber else { return nil }
        let purpose = Array("tokenkeeperd: provider tokens for other daemons, 1".utf8)
        var length: UInt32 = 0
        key = unsafe SecretBytes(count: 32) { memory in
            unsafe secret.withBytes { secret in
                _ = unsafe HMAC(
                    EVP_sha256(), secret.baseAddress, CInt(secret.count), purpose, purpose.count,
                    memory.baseAddress?.assumingMemoryBound(to: UInt8.self), &length)
            }
        }
        if length != 32 { return nil }
    }

    /// - Parameter name: What it is the token of. It is not hidden, and must be the same to open it.
    /// - Returns: A nonce, the encrypted text and a tag, in base64; nil if OpenSSL fails.
    func sealed(_ text: String, of name: String) -> String? {
        var nonce = [UInt8](repeating: 0, count: Self.nonceLength)
        guard unsafe RAND_bytes(&nonce, CInt(nonce.count)) == 1 else { return nil }
        guard let context = unsafe begin(nonce, name, encrypts: 1) else { return nil }
        defer { unsafe EVP_CIPHER_CTX_free(context) }
        let plain = Array(text.utf8)
        var (hidden, tag) = ([UInt8](repeating: 0, count: plain.count), [UInt8](repeating: 0, count: Self.tagLength))
        var (count, rest): (CInt, CInt) = (0, 0)
        guard unsafe EVP_CipherUpdate(context, &hidden, &count, plain, CInt(plain.count)) == 1,
            Int(count) == plain.count,
            unsafe EVP_CipherFinal_ex(context, nil, &rest) == 1,
            unsafe EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, CInt(tag.count), &tag) == 1
        else { return nil }
        return Data(nonce + hidden + tag).base64EncodedString()
    }

    /// Nil unless this key has sealed it, and nobody has changed it since.
    func opened(_ text: String, of name: String) -> String? {
        guard let sealed = Data(base64Encoded: text).map(Array.init) else { return nil }
        let length = sealed.count - Self.nonceLength - Self.tagLength
        guard 1...4096 ~= length, let context = unsafe begin(Array(sealed.prefix(Self.nonceLength)), name, encrypts: 0)
        else { return nil }
        defer { unsafe EVP_CIPHER_CTX_free(context) }
        let hidden = Array(sealed.dropFirst(Self.nonceLength).prefix(length))
        var (plain, tag) = ([UInt8](repeating: 0, count: length), Array(sealed.suffix(Self.tagLength)))
        var (count, rest): (CInt, CInt) = (0, 0)
        guard unsafe EVP_CipherUpdate(context, &plain, &count, hidden, CInt(length)) == 1, Int(count) == length,
            unsafe EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, CInt(tag.count), &tag) == 1,
            unsafe EVP_CipherFinal_ex(context, nil, &rest) == 1
        else { return nil }
        return String(validating: plain, as: UTF8.self)
    }

    /// A cipher that has the key, the nonce and the name. The caller frees it.
    private func begin(_ nonce: [UInt8], _ name: String, encrypts: CInt) -> OpaquePointer? {
        guard let context = unsafe EVP_CIPHER_CTX_new() else { return nil }
        let named = Array(name.utf8)
        var count: CInt = 0
        let isReady = unsafe key.withBytes { key in
            let start = unsafe key.baseAddress?.assumingMemoryBound(to: UInt8.self)
            return unsafe EVP_CipherInit_ex(context, EVP_aes_256_gcm(), nil, start, nonce, encrypts) == 1
                && EVP_CipherUpdate(context, nil, &count, named, CInt(named.count)) == 1
        }
        if isReady { return unsafe context }
        unsafe EVP_CIPHER_CTX_free(context)
        return nil
    }
}
