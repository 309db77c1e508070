import COpenSSL
import Foundation

/// ECDSA over P-256 with SHA-256. Signatures have the form of JWTs: r and s, 32 bytes each.
///
/// Each call parses the key again: a provider signs three times an hour, and each JWT is verified once.
enum ES256 {
    /// - Parameter publicKey: PEM.
    static func verifies(_ signature: [UInt8], of text: [UInt8], publicKey: String) -> Bool {
        guard signature.count == 64, let key = PEM.read(publicKey, { PEM_read_bio_PUBKEY($0, nil, nil, nil) }) else {
            return false
        }
        defer { EVP_PKEY_free(key) }
        let context = EVP_MD_CTX_new()
        defer { EVP_MD_CTX_free(context) }
        let der = self.der(signature)
        defer { ERR_clear_error() }
        return EVP_DigestVerifyInit(context, nil, EVP_sha256(), nil, key) == 1
            && EVP_DigestVerify(context, der, der.count, text, text.count) == 1
    }

    /// - Parameter privateKey: PEM, PKCS#8.
    static func sign(_ text: [UInt8], privateKey: String) -> [UInt8]? {
        guard let key = PEM.read(privateKey, { PEM_read_bio_PrivateKey($0, nil, nil, nil) }) else { return nil }
        defer { EVP_PKEY_free(key) }
        let context = EVP_MD_CTX_new()
        defer { EVP_MD_CTX_free(context) }
        var der = [UInt8](repeating: 0, count: 80)
        var length = der.count
        guard EVP_DigestSignInit(context, nil, EVP_sha256(), nil, key) == 1,
            EVP_DigestSign(context, &der, &length, text, text.count) == 1
        else { return nil }
        return raw(Array(der[..<length]))
    }

    /// A SEQUENCE of two INTEGERs, which are signed and have no leading zeros.
    private static func der(_ signature: [UInt8]) -> [UInt8] {
        func integer(_ bytes: ArraySlice<UInt8>) -> [UInt8] {
            var digits = Array(bytes.drop { $0 == 0 })
            if digits.isEmpty || digits[0] >= 0x80 { digits.insert(0, at: 0) }
            return [0x02, UInt8(digits.count)] + digits
        }
        let both = integer(signature[..<32]) + integer(signature[32...])
        return [0x30, UInt8(both.count)] + both
    }

    private static func raw(_ der: [UInt8]) -> [UInt8] {
        var position = 2
        var raw: [UInt8] = []
        for _ in 0..<2 {
            let length = Int(der[position + 1])
            let digits = der[(position + 2)..<(position + 2 + length)].drop { $0 == 0 }
            raw += [UInt8](repeating: 0, count: 32 - digits.count) + digits
            position += 2 + length
        }
        return raw
    }
}

/// The Base64 of JWTs: another alphabet, and no padding.
enum Base64URL {
    static func encode(_ bytes: [UInt8]) -> String {
        Data(bytes).base64EncodedString().replacingOccurrences(of: "+", with: "-")
            .replacingOccurrences(of: "/", with: "_").replacingOccurrences(of: "=", with: "")
    }

    static func decode(_ text: Substring) -> [UInt8]? {
        if text.utf8.contains(where: { "+/=".utf8.contains($0) }) { return nil }
        let defaultValue = text.replacingOccurrences(of: "-", with: "+").replacingOccurrences(of: "_", with: "/")
        return Data(base64Encoded: defaultValue + String(repeating: "=", count: (4 - defaultValue.utf8.count % 4) % 4))
            .map {
                Array($0)
            }
    }
}
