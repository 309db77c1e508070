internal import TokenModel

/// An HTTP proxy that the client asks with CONNECT for a tunnel to the server. Nobody reads the tunnel: TLS with the server goes
/// through it. With `https`, the connection to the proxy has TLS of its own.
public struct PushProxy: Sendable, Equatable, CustomStringConvertible {
    let scheme: String
    /// As in a URL: an IPv6 address has brackets.
    let host: String
    let port: Int
    /// Percent-encoded, as in a URL.
    private let user: String?
    private let password: String?
    /// A file with only the password in it, in its first line and not encoded. It is read again for each connection.
    public var passwordFile: String?

    public var hasUser: Bool { user != nil }
    public var hasPassword: Bool { password != nil }

    /// Where the proxy is, without the user and the password.
    public var description: String { "\(scheme)://\(host):\(port)" }

    /// - Parameter text: `http://host:port` or `https://host:port`, also with `user@` or `user:password@` before the host, both
    ///   percent-encoded. A `/` may follow.
    /// - Returns: Nil for anything else.
    public init?(_ text: String) {
        guard let schemeEnd = text.firstRange(of: "://") else { return nil }
        scheme = text[..<schemeEnd.lowerBound].lowercased()
        guard scheme == "http" || scheme == "https" else { return nil }
        var place = text[schemeEnd.upperBound...]
        if place.hasSuffix("/") { place.removeLast() }
        if let at = place.lastIndex(of: "@") {
            let parts = place[..<at].split(separator: ":", maxSplits: 1, omittingEmptySubsequences: false)
            guard !parts[0].isEmpty, parts.allSatisfy(Self.isEncoded) else { return nil }
            user = String(parts[0])
            password = parts.count == 2 ? String(parts[1]) : nil
            place = place[place.index(after: at)...]
        } else {
            (user, password) = (nil, nil)
        }
        guard let server = PushServer(String(place)) else { return nil }
        host = server.hostInURL
        port = server.port
    }

    /// Whether a user or a password can be a part of a URL as it is.
    private static func isEncoded(_ text: Substring) -> Bool {
        text.allSatisfy { $0.isASCII && !$0.isWhitespace && !"/?#@[]".contains($0) && $0.asciiValue ?? 0 > 0x20 }
    }

    /// The URL with the user and the password.
    ///
    /// - Throws: If the password file cannot be read.
    func url() throws(TLSConnection.Failure) -> SecretBytes {
        guard let user else { return SecretBytes(description.utf8) }
        let start = "\(scheme)://\(user):"
        let end = "@\(host):\(port)"
        guard let passwordFile else { return SecretBytes((start + (password ?? "") + end).utf8) }
        let bytes: SecretBytes
        do {
            bytes = try SecretBytes(contentsOf: passwordFile).firstLine
        } catch {
            throw TLSConnection.Failure(
                message: "cannot read the password of the proxy \(self): \(passwordFile): \(error)")
        }
        // Each byte of the password is percent-encoded, so that none needs to be examined: three characters for each.
        return unsafe bytes.withBytes { bytes in
            unsafe SecretBytes(count: start.utf8.count + 3 * bytes.count + end.utf8.count) { memory in
                unsafe memory.copyBytes(from: start.utf8)
                let digits = Array("0123456789ABCDEF".utf8)
                var place = start.utf8.count
                for index in 0..<bytes.count {
                    let byte = unsafe bytes[index]
                    unsafe memory[place] = UInt8(ascii: "%")
                    unsafe memory[place + 1] = digits[Int(byte >> 4)]
                    unsafe memory[place + 2] = digits[Int(byte & 15)]
                    place += 3
                }
                for byte in end.utf8 {
                    unsafe memory[place] = byte
                    place += 1
                }
            }
        }
    }
}
