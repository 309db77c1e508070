internal import APNsFeedback

/// A host and a port as people write them: `api.push.apple.com:443`, `[::1]:2197`.
enum ServerText {
    /// - Returns: Nil if the text is not a host and a port.
    static func server(_ text: String) -> PushServer? {
        guard let colon = text.lastIndex(of: ":"), let port = Int(text[text.index(after: colon)...]), 1...65535 ~= port
        else { return nil }
        let host = text[..<colon]
        let isAddress = host.hasPrefix("[") && host.hasSuffix("]")
        let allowed = Set(
            isAddress
                ? "[]:.0123456789abcdefABCDEF" : "-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        guard !host.isEmpty, host.allSatisfy(allowed.contains) else { return nil }
        return PushServer(host: String(host), port: port)
    }
}
