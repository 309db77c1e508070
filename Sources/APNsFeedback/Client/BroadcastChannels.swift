internal import FoundationEssentials
public import TokenModel

/// The channels of an app, for broadcasts to Live Activities: a push to a channel reaches all devices that have subscribed to it. Channels have no device
/// tokens, so they are no part of the ledger. Each call is one request and waits for its response.
///
/// Source: Apple, "Sending channel management requests to APNs" and "Sending broadcast push notification requests to APNs".
public struct BroadcastChannels {
    /// Why a call has not worked, in one line.
    public struct Failure: Error, CustomStringConvertible {
        public let description: String
    }

    /// A push to a channel.
    public struct Push {
        public var payload: [UInt8]
        /// 10 or 5.
        public var priority: Int
        /// Seconds since the Unix epoch; 0 to deliver it at once or not at all.
        public var expiration: Int64

        public init(payload: [UInt8], priority: Int, expiration: Int64) {
            (self.payload, self.priority, self.expiration) = (payload, priority, expiration)
        }
    }

    private let app: String
    private let identity: PushIdentity
    private let options: PushClientOptions
    private let server: PushServer
    private let managing: PushServer

    /// - Parameters:
    ///   - app: Its bundle identifier, such as `com.example.app`.
    ///   - options: If they name another server than Apple's, that one also manages channels.
    public init(of app: Topic, in environment: Environment, _ identity: PushIdentity, _ options: PushClientOptions) {
        self.app = app.name
        self.identity = identity
        self.options = options
        server = options.server(of: environment)
        managing =
            server.host == PushServer.apple(environment).host ? .appleManagingChannels(environment) : server
    }

    /// - Parameter keepsLatest: Whether APNs keeps the latest push for devices that subscribe or come online later.
    /// - Returns: The identifier of the channel, base64.
    public func create(keepsLatest: Bool) throws(Failure) -> String {
        let settings = #"{"message-storage-policy":\#(keepsLatest ? 1 : 0),"push-type":"LiveActivity"}"#
        let response = try ask("POST", "channels", channel: nil, body: Array(settings.utf8))
        guard let channel = response.headers["apns-channel-id"], !channel.isEmpty else {
            throw Failure(description: "the response has no apns-channel-id")
        }
        return channel
    }

    /// - Returns: The identifiers of all channels, in APNs' order.
    public func list() throws(Failure) -> [String] {
        struct Channels: Decodable { var channels: [String] }
        return try decoded(Channels.self, try ask("GET", "all-channels", channel: nil)).channels
    }

    /// - Returns: Whether APNs keeps the latest push to the channel.
    public func keepsLatest(_ channel: String) throws(Failure) -> Bool {
        struct Settings: Decodable {
            var policy: Int
            enum CodingKeys: String, CodingKey { case policy = "message-storage-policy" }
        }
        return try decoded(Settings.self, try ask("GET", "channels", channel: channel)).policy == 1
    }

    public func delete(_ channel: String) throws(Failure) {
        _ = try ask("DELETE", "channels", channel: channel)
    }

    /// Apple's page names the servers of all other pushes for this; its examples name `api-broadcast.push.apple.com`.
    ///
    /// - Returns: The identifier of the request at APNs; nil if the response has none.
    public func send(_ push: Push, to channel: String) throws(Failure) -> String? {
        let headers = [
            ("apns-channel-id", channel), ("apns-push-type", "liveactivity"), ("apns-priority", "\(push.priority)"),
            ("apns-expiration", "\(push.expiration)"),
        ]
        let request = SingleRequest(
            method: "POST", path: "/4/broadcasts/apps/\(app)", headers: headers, body: push.payload)
        let response = try perform(request, at: server)
        return response.headers["apns-unique-id"] ?? response.headers["apns-request-id"]
    }

    private func ask(
        _ method: String, _ what: String, channel: String?, body: [UInt8]? = nil
    ) throws(Failure) -> SingleRequest.Response {
        let headers = channel.map { [("apns-channel-id", $0)] } ?? []
        return try perform(
            SingleRequest(method: method, path: "/1/apps/\(app)/\(what)", headers: headers, body: body), at: managing)
    }

    private func perform(_ request: SingleRequest, at server: PushServer) throws(Failure) -> SingleRequest.Response {
        // It is a header's value.
        if let bad = request.headers.first(where: { !$0.value.utf8.allSatisfy { 0x21...0x7E ~= $0 } }) {
            throw Failure(description: "\(bad.name) has a character that a header cannot have")
        }
        let response: SingleRequest.Response
        do throws(TLSConnection.Failure) {
            response = try request.perform(at: server, identity, options)
        } catch {
            throw Failure(description: error.message)
        }
        if response.headers["apns-request-id"] != nil, (200...299).contains(response.status) { return response }
        let body = ResponseBody(String(decoding: response.body, as: UTF8.self))
        guard let reason = body.reason, body.isReasonOneWord else {
            throw Failure(description: Interpretation.words(ofForeign: response.status))
        }
        throw Failure(description: "APNs answered \(response.status) \(reason)")
    }

    private func decoded<Content: Decodable>(
        _: Content.Type, _ response: SingleRequest.Response
    ) throws(Failure) -> Content {
        do { return try JSONDecoder().decode(Content.self, from: Data(response.body)) } catch {
            throw Failure(description: "the response is not as APNs writes it")
        }
    }
}

extension PushServer {
    /// Apple's server that manages channels. Source: Apple, "Sending channel management requests to APNs".
    static func appleManagingChannels(_ environment: Environment) -> PushServer {
        switch environment {
        case .production: PushServer(host: "api-manage-broadcast.push.apple.com", port: 2196)
        case .sandbox: PushServer(host: "api-manage-broadcast.sandbox.push.apple.com", port: 2195)
        }
    }
}
