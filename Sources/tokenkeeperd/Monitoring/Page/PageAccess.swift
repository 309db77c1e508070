/// Who may see the status page: the setting `metrics.page`.
enum PageAccess: String, CaseIterable, Sendable {
    /// Nobody.
    case off
    /// Only clients on this machine, and only under an IP address, `localhost`, or through a Unix socket.
    case loopback
    /// Everybody who can connect, under any name.
    case network

    /// Whether a request may see the page.
    ///
    /// - Parameters:
    ///   - isLocal: Whether the client is on this machine.
    ///   - host: The Host header; nil if there is none. A web page from elsewhere can send a browser on this machine here, under a name that
    ///     it controls (DNS rebinding), and read the response. It cannot do so under an IP address.
    func admits(isLocal: Bool, host: String?) -> Bool {
        switch self {
        case .off: false
        case .network: true
        case .loopback: isLocal && host.map(Self.isAddress) ?? false
        }
    }

    /// Whether the Host header is an IP address or `localhost`, with or without a port.
    private static func isAddress(_ host: String) -> Bool {
        if host.hasPrefix("[") {
            guard let end = host.firstIndex(of: "]") else { return false }
            let rest = host[host.index(after: end)...]
            return host[..<end].dropFirst().allSatisfy { $0.isHexDigit || $0 == ":" || $0 == "." }
                && (rest.isEmpty || rest.first == ":" && rest.dropFirst().allSatisfy(\.isNumber))
        }
        let parts = host.split(separator: ":", omittingEmptySubsequences: false)
        guard let name = parts.first, parts.count <= 2, parts.dropFirst().allSatisfy({ $0.allSatisfy(\.isNumber) })
        else { return false }
        if name.lowercased() == "localhost" { return true }
        let bytes = name.split(separator: ".", omittingEmptySubsequences: false)
        return bytes.count == 4 && bytes.allSatisfy { UInt8($0) != nil }
    }
}
