internal import APNsFeedback

/// The settings of the proxy between the daemon and APNs: `send.proxy` and `send.proxy_password_file`.
struct ProxySettings {
    /// The value of `send.proxy` that ignores the environment.
    static let none = "none"

    private let proxy: Configuration.Resolved?
    private let passwordFile: Configuration.Resolved?

    init(in values: [String: Configuration.Resolved]) {
        proxy = values["send.proxy"]
        passwordFile = values["send.proxy_password_file"]
    }

    static func accepts(_ text: String) -> Bool { text == none || PushProxy(text) != nil }

    func addProblems(to problems: inout ConfigurationProblems) {
        guard let file = passwordFile, file.value != nil else { return }
        let named = proxy?.value.flatMap(PushProxy.init)
        if named?.hasUser != true {
            problems.add(
                "\(file.origin): send.proxy_password_file is set, expected send.proxy too, with a user: http://user@host:port"
            )
        } else if named?.hasPassword == true {
            problems.add(
                "\(file.origin): send.proxy_password_file is set, and send.proxy contains a password: keep one")
        }
    }

    var route: PushRoute {
        guard let text = proxy?.value else { return .environment }
        guard text != Self.none, var named = PushProxy(text) else { return .direct }
        named.passwordFile = passwordFile?.value
        return .proxy(named)
    }

    /// The configuration file in which `send.proxy` contains a password; nil if there is none.
    var fileWithPassword: String? {
        proxy?.value.flatMap(PushProxy.init)?.hasPassword == true ? proxy?.file : nil
    }

    /// The proxy in use, for the log: its place without the user and the password, and where it comes from. Nil if there is none.
    static func described(_ route: PushRoute) -> (proxy: String, from: String)? {
        switch route {
        case .direct: nil
        case .proxy(let proxy): ("\(proxy)", "send.proxy")
        case .environment:
            PushRoute.proxyVariable().map { name, value in
                (PushProxy(value).map { "\($0)" } ?? "not shown", "the environment variable \(name)")
            }
        }
    }
}
