import Foundation

/// A provider's JWT whose form and signature are right. Whether it is fresh depends on when one asks.
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
        // JSONDecoder takes only a JSON number for this, not a text, as APNs does.
        let iat: Double
    }

    /// - Parameter text: Without `bearer`. Nil when it is not a JWT, of another algorithm, of an unknown key or another's team, or
    ///   not signed by that key.
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

    /// Reuse ends after an hour. Clocks of providers may be some minutes ahead.
    func isFresh(at milliseconds: Int64) -> Bool {
        let now = Double(milliseconds) / 1000
        return now - issuedAt <= 3600 && issuedAt - now <= 300
    }
}
