internal import CCurl

/// Receives libcurl's debug log and the client's own lines, and removes secrets.
final class TraceSink: Sendable {
    private let sink: @Sendable (String) -> Void

    init(_ sink: @escaping @Sendable (String) -> Void) {
        self.sink = sink
    }

    func say(_ line: String) {
        if let line = Self.presentable(line) { sink(line) }
    }

    /// A line of the log without secrets; nil if the whole line is one. A path keeps 8 digits of its token.
    static func presentable(_ line: String) -> String? {
        let small = line.lowercased()
        // libcurl repeats the variable https_proxy, which may have a password.
        if ["authorization", "bearer", "proxy env variable", "unsupported proxy"].contains(where: small.contains) {
            return nil
        }
        guard let devices = line.firstRange(of: "/3/device/") else { return line }
        let token = line[devices.upperBound...]
        let rest = token.drop(while: \.isHexDigit)
        return line[..<devices.upperBound] + token.prefix(8).prefix(while: \.isHexDigit) + "…"
            + (presentable(String(rest)) ?? "")
    }

    /// Takes libcurl's remarks, but neither headers nor bodies.
    static let callback: curl_debug_callback = { _, kind, bytes, count, this in
        guard kind == CURLINFO_TEXT, let bytes = unsafe bytes, let this = unsafe this else { return 0 }
        let text = unsafe String(decoding: UnsafeRawBufferPointer(start: bytes, count: count), as: UTF8.self)
        let trace = unsafe Unmanaged<TraceSink>.fromOpaque(this).takeUnretainedValue()
        for line in text.split(whereSeparator: \.isNewline) {
            trace.say(String(line))
        }
        return 0
    }
}
