/// Where the daemon listens for scrapes: `127.0.0.1:9188`, `[::1]:9188` or `unix:/run/tokenkeeperd/metrics.sock`.
enum ListenAddress: Equatable, Sendable, CustomStringConvertible {
    case tcp(host: String, port: Int)
    /// The path of a Unix socket.
    case unix(String)

    /// - Returns: Nil if the text is neither an IP address with a port, nor `unix:` with an absolute path of at most 107 bytes. A name is
    ///   refused: it may resolve to another address tomorrow.
    init?(_ text: String) {
        if text.hasPrefix("unix:") {
            let path = String(text.dropFirst("unix:".count))
            guard path.hasPrefix("/"), path.utf8.count <= 107 else { return nil }
            self = .unix(path)
            return
        }
        guard let colon = text.lastIndex(of: ":"), let port = Int(text[text.index(after: colon)...]), 1...65535 ~= port
        else { return nil }
        var host = text[..<colon]
        let isV6 = host.hasPrefix("[") && host.hasSuffix("]")
        if isV6 { host = host.dropFirst().dropLast() }
        let isAddress = isV6 ? host.contains(":") : host.split(separator: ".").count == 4
        guard isAddress, host.allSatisfy({ $0.isHexDigit || $0 == "." || $0 == ":" }) else { return nil }
        self = .tcp(host: String(host), port: port)
    }

    /// As people write it.
    var description: String {
        switch self {
        case .tcp(let host, let port): host.contains(":") ? "[\(host)]:\(port)" : "\(host):\(port)"
        case .unix(let path): "unix:\(path)"
        }
    }
}
