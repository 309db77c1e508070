internal import Glibc
public import TokenModel

/// The server for an environment's requests.
public struct PushServer: Sendable, Hashable {
    /// A host name or an address, as in the server's certificate: an IPv6 address without brackets.
    public var host: String
    /// 1 to 65535. Apple's servers listen on 443 and 2197.
    public var port: Int

    public init(host: String, port: Int = 443) {
        self.host = host
        self.port = port
    }

    /// - Parameter text: A host and a port as people write them: `api.push.apple.com:443`, `[::1]:2197`.
    /// - Returns: Nil for anything else.
    public init?(_ text: String) {
        guard let colon = text.lastIndex(of: ":"), text[colon...].dropFirst().allSatisfy({ $0.isASCII && $0.isNumber }),
            let port = Int(text[text.index(after: colon)...]), 1...65535 ~= port
        else { return nil }
        var host = text[..<colon]
        if host.hasPrefix("["), host.hasSuffix("]") {
            host = host.dropFirst().dropLast()
            var address = in6_addr()
            guard unsafe inet_pton(AF_INET6, String(host), &address) == 1 else { return nil }
        } else {
            guard !host.isEmpty,
                host.allSatisfy({ $0.isASCII && ($0.isLetter || $0.isNumber || $0 == "-" || $0 == ".") })
            else { return nil }
        }
        self.init(host: String(host), port: port)
    }

    /// The host as in a URL: an IPv6 address has brackets.
    var hostInURL: String { host.contains(":") ? "[\(host)]" : host }

    /// Apple's server for an environment. Source: Apple, "Sending notification requests to APNs".
    public static func apple(_ environment: Environment) -> PushServer {
        switch environment {
        case .production: PushServer(host: "api.push.apple.com")
        case .sandbox: PushServer(host: "api.sandbox.push.apple.com")
        }
    }
}
