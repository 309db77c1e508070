internal import Glibc

/// How connections leave this machine.
public enum PushRoute: Sendable, Equatable {
    /// As the environment says: libcurl reads `https_proxy`, `HTTPS_PROXY`, `all_proxy`, `ALL_PROXY`, `no_proxy` and `NO_PROXY`.
    case environment
    /// Directly, whatever the environment says.
    case direct
    /// Through this proxy, whatever the environment says.
    case proxy(PushProxy)

    /// The variable of the environment that names a proxy, in libcurl's order, and its value.
    public static func proxyVariable() -> (name: String, value: String)? {
        for name in ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
            guard let value = unsafe getenv(name).map({ unsafe String(cString: $0) }), !value.isEmpty else { continue }
            return (name, value)
        }
        return nil
    }

    /// The proxy as error messages name it, without the user and the password; nil if there is none.
    var proxyName: String? {
        switch self {
        case .direct: nil
        case .proxy(let proxy): "the proxy \(proxy)"
        case .environment:
            Self.proxyVariable().map { name, value in
                "the proxy \(PushProxy(value).map { "\($0), from" } ?? "in") the environment variable \(name)"
            }
        }
    }
}
