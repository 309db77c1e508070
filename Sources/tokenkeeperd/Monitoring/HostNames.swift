/// The names under which the daemon answers scrapes, health checks and browsers: the rule for the Host header.
///
/// A web page from elsewhere can send a browser that reaches this daemon here, under a name that the page's owner controls (DNS rebinding), and
/// read the response. Nobody can do so under an IP address, or under a name without a dot, which no public name server knows.
struct HostNames: Sendable {
    private let names: Set<String>

    /// - Parameter more: The setting `metrics.hosts`.
    init(_ more: [String], machine: String = Daemon.hostName) {
        // A name may be copied with its port, as Prometheus has it, or with the dot of its root.
        names = Set(
            (more + [machine]).map { name in
                let host = name.lowercased().prefix { $0 != ":" }
                return String(host.hasSuffix(".") ? host.dropLast() : host)
            })
    }

    /// - Parameter host: The Host header; nil if there is none, which no browser leaves out.
    func admit(_ host: String?) -> Bool {
        guard let host else { return true }
        if host.hasPrefix("[") {
            guard let end = host.firstIndex(of: "]") else { return false }
            let rest = host[host.index(after: end)...]
            return host[..<end].dropFirst().allSatisfy { $0.isHexDigit || $0 == ":" || $0 == "." }
                && (rest.isEmpty || rest.first == ":" && rest.dropFirst().allSatisfy(\.isNumber))
        }
        let parts = host.split(separator: ":", omittingEmptySubsequences: false)
        guard var name = parts.first?.lowercased(), parts.count <= 2,
            parts.dropFirst().allSatisfy({ $0.allSatisfy(\.isNumber) })
        else { return false }
        if name.hasSuffix(".") { name.removeLast() }
        if names.contains(name) { return true }
        let labels = name.split(separator: ".", omittingEmptySubsequences: false)
        if labels.count == 4, labels.allSatisfy({ UInt8($0) != nil }) { return true }
        return labels.count == 1 && name.wholeMatch(of: #/[a-z0-9_-]+/#) != nil
    }
}
