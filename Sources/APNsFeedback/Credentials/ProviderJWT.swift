import FoundationEssentials

/// The form of a provider token: a JSON Web Token (RFC 7519) that names a key and a team, and is signed by that key (ES256).
struct ProviderJWT: Sendable {
    let key: SigningKey
    /// Neither identifier has a character that JSON escapes.
    let keyID: String
    let teamID: String

    /// A new token.
    ///
    /// - Parameter issuedAt: Seconds since the Unix epoch. Apple accepts `iat` only as a number.
    /// - Throws: If it cannot be signed.
    func text(issuedAt: Int64) throws(CredentialError) -> String {
        let signed = signedPart(issuedAt: issuedAt)
        return "\(signed).\(Self.base64URL(try key.sign(Array(signed.utf8))))"
    }

    /// When a token was issued, in seconds since the Unix epoch. Nil if `text` did not make it with this key, byte for byte in the
    /// same form.
    func issuedAt(of text: String) -> Int64? {
        let parts = text.split(separator: ".", omittingEmptySubsequences: false)
        guard parts.count == 3, let claims = Self.decoded(parts[1]), let signature = Self.decoded(parts[2]) else {
            return nil
        }
        let beginning = Self.claimsBeforeTime(teamID)
        let claimsText = String(decoding: claims, as: UTF8.self)
        guard claimsText.hasPrefix(beginning), let issuedAt = Int64(claimsText.dropFirst(beginning.count).dropLast())
        else { return nil }
        // Comparing the whole text leaves no other spelling of the claims, of the number or of base64.
        let signed = signedPart(issuedAt: issuedAt)
        guard text == "\(signed).\(Self.base64URL(signature))", key.hasSigned(Array(signed.utf8), signature) else {
            return nil
        }
        return issuedAt
    }

    private func signedPart(issuedAt: Int64) -> String {
        let header = Self.base64URL(Array(#"{"alg":"ES256","kid":"\#(keyID)"}"#.utf8))
        let claims = Self.base64URL(Array("\(Self.claimsBeforeTime(teamID))\(issuedAt)}".utf8))
        return "\(header).\(claims)"
    }

    private static func claimsBeforeTime(_ teamID: String) -> String { #"{"iss":"\#(teamID)","iat":"# }

    /// RFC 4648, 5, without padding: RFC 7515, 2.
    private static func base64URL(_ bytes: [UInt8]) -> String {
        let text = Data(bytes).base64EncodedString().utf8.compactMap { character -> UInt8? in
            switch character {
            case UInt8(ascii: "+"): UInt8(ascii: "-")
            case UInt8(ascii: "/"): UInt8(ascii: "_")
            case UInt8(ascii: "="): nil
            default: character
            }
        }
        return String(decoding: text, as: UTF8.self)
    }

    private static func decoded(_ text: Substring) -> [UInt8]? {
        let base64 = text.utf8.map { character in
            switch character {
            case UInt8(ascii: "-"): UInt8(ascii: "+")
            case UInt8(ascii: "_"): UInt8(ascii: "/")
            default: character
            }
        }
        let padding = [UInt8](repeating: UInt8(ascii: "="), count: (4 - base64.count % 4) % 4)
        return Data(base64Encoded: Data(base64 + padding)).map(Array.init)
    }
}
