/// Who may see the status page: the setting `metrics.page`.
enum PageAccess: String, CaseIterable, Sendable {
    /// Nobody.
    case off
    /// Only clients on this machine.
    case loopback
    /// Everybody who can connect.
    case network

    /// Whether a client may see the page.
    ///
    /// - Parameter isLocal: Whether it is on this machine.
    func admits(isLocal: Bool) -> Bool {
        switch self {
        case .off: false
        case .network: true
        case .loopback: isLocal
        }
    }
}
