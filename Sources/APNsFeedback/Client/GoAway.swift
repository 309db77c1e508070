/// A server's notice that it will close a connection (RFC 9113, 6.8).
public struct PushGoAway: Sendable, Equatable {
    /// The error code: 0 for none.
    public var code: UInt32
    /// What the server sent with it, as it may be logged: at most 200 characters of printable ASCII; nil if there was nothing.
    /// APNs sends `{"reason": "…"}`.
    public var text: String?
    /// The reason in that text, if it is APNs' form.
    public var reason: String? { ResponseBody(text).reason }

    public init(code: UInt32, text: String? = nil) {
        self.code = code
        self.text = text
    }

    /// - Parameter data: The frame's debug data.
    init(code: UInt32, data: some Sequence<UInt8>) {
        let shown = data.prefix(200).map { 0x20...0x7e ~= $0 ? $0 : UInt8(ascii: "?") }
        self.init(code: code, text: shown.isEmpty ? nil : String(decoding: shown, as: UTF8.self))
    }

    /// One line for people.
    public var message: String {
        "GOAWAY \(HTTP2Error.name(code))" + (text.map { " \($0)" } ?? "")
    }

    /// Reasons of a server that ends a connection for its own sake.
    private static let ownReasons: Set<String> = [
        "IdleTimeout", "InternalServerError", "ServiceUnavailable", "Shutdown",
    ]

    /// Whether the server ends the connection for what the sender did: with a reason such as `BadCertificate` (also one that this
    /// version does not know), or with an error code other than `INTERNAL_ERROR`.
    public var blamesSender: Bool {
        if let reason { return !Self.ownReasons.contains(reason) }
        return code != HTTP2Error.noError && code != HTTP2Error.internalError
    }
}

/// What a server holds against the sender.
public struct PushFault: Sendable, Equatable {
    /// The last GOAWAY that blames the sender.
    public var goAway: PushGoAway
    /// How many of them came since the client started.
    public var count: Int
    /// Whether the server has answered no request since, on a connection that it has not told to go.
    public var isCurrent: Bool

    public init(_ goAway: PushGoAway, count: Int = 1, isCurrent: Bool = true) {
        self.goAway = goAway
        self.count = count
        self.isCurrent = isCurrent
    }
}

/// The error codes of RFC 9113, 7.
enum HTTP2Error {
    static let noError: UInt32 = 0
    static let internalError: UInt32 = 2
    static let refusedStream: UInt32 = 7
    static let cancel: UInt32 = 8

    private static let names = [
        "NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
        "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
        "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
    ]

    static func name(_ code: UInt32) -> String {
        code < names.count ? names[Int(code)] : "with code \(code)"
    }
}
