import Foundation

/// A provider's JWT with a valid form and signature. Its age is checked separately.
///
/// Source: Apple, "Establishing a token-based connection to APNs".
struct ProviderToken {
    let key: String
    let team: String
    /// Seconds since the Unix epoch.
    let issuedAt: Double

    private struct Header: Decodable {
        let alg: String
        let kid: String
    }
    private struct Claims: Decodable {
        let iss: String
        // Like APNs, JSONDecoder accepts only a JSON number here, not a string.
        let iat: Double
    }

    /// Nil if the text is not a JWT, has another algorithm, an unknown key or the wrong team, or is not signed by that key.
    ///
    /// - Parameter text: The JWT without `bearer`.
    init?(_ text: String, keys: [FakeSigningKey]) {
        let parts = text.split(separator: ".", omittingEmptySubsequences: false)
        guard parts.count == 3, let header = Base64URL.decode(parts[0]), let claims = Base64URL.decode(parts[1]),
            let signature = Base64URL.decode(parts[2]),
            let header = try? JSONDecoder().decode(Header.self, from: Data(header)), header.alg == "ES256",
            let claims = try? JSONDecoder().decode(Claims.self, from: Data(claims)),
            let key = keys.first(where: { $0.id == header.kid && $0.team == claims.iss }),
            ES256.verifies(signature, of: Array("\(parts[0]).\(parts[1])".utf8), publicKey: key.publicKey)
        else { return nil }
        self.key = header.kid
        team = claims.iss
        issuedAt = claims.iat
    }

    /// A JWT is valid for an hour. A provider's clock may be up to five minutes ahead.
    func isFresh(at milliseconds: Int64) -> Bool {
        let now = Double(milliseconds) / 1000
        return now - issuedAt <= 3600 && issuedAt - now <= 300
    }
}
