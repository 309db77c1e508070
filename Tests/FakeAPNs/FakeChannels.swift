import NIOCore
import Synchronization

/// Channels for broadcasts, as Apple's servers manage them and send to them.
///
/// Source: Apple, "Sending channel management requests to APNs" and "Sending broadcast push notification requests to APNs".
final class FakeChannels: Sendable {
    /// By app, in the order of their creation.
    private let channels = Mutex<[String: [(id: String, keepsLatest: Bool)]]>([:])

    /// What a request for channels asks; nil if its path is another one.
    func answer(_ headers: RequestHeaders, _ body: ByteBuffer, _ identifiers: inout IdentifierMaker) -> FakeAnswer? {
        let parts = (headers.path ?? "").split(separator: "/", omittingEmptySubsequences: false).dropFirst()
        let path = Array(parts)
        let requestID = ("apns-request-id", identifiers.next())
        switch (headers.method, path.count) {
        case ("POST", 4) where path.starts(with: ["4", "broadcasts", "apps"]):
            return broadcast(headers, to: String(path[3]), body, requestID)
        case ("GET", 4) where path.starts(with: ["1", "apps"]) && path[3] == "all-channels":
            let names = all(of: String(path[2])).map { "\"\($0.id)\"" }.joined(separator: ",")
            return .raw(.init(status: "200", headers: [requestID], body: Array("{\"channels\":[\(names)]}".utf8)))
        case ("POST", 4) where path.starts(with: ["1", "apps"]) && path[3] == "channels":
            return create(in: String(path[2]), String(buffer: body), identifiers.next(), requestID)
        case (_, 4) where path.starts(with: ["1", "apps"]) && path[3] == "channels":
            return one(headers, of: String(path[2]), requestID)
        default: return nil
        }
    }

    private func all(of app: String) -> [(id: String, keepsLatest: Bool)] { channels.withLock { $0[app] ?? [] } }

    private func create(in app: String, _ settings: String, _ id: String, _ requestID: (String, String)) -> FakeAnswer {
        guard settings.contains("\"push-type\":\"LiveActivity\"") else { return .refused(400, "InvalidPushType") }
        // Base64, as Apple's are.
        let id = id.filter { $0 != "-" }.prefix(22) + "=="
        channels.withLock {
            $0[app, default: []].append((String(id), settings.contains("\"message-storage-policy\":1")))
        }
        return .raw(.init(status: "201", headers: [requestID, ("apns-channel-id", String(id))]))
    }

    private func one(_ headers: RequestHeaders, of app: String, _ requestID: (String, String)) -> FakeAnswer {
        guard let id = headers.channelID else { return .refused(400, "MissingChannelId") }
        guard let channel = all(of: app).first(where: { $0.id == id }) else {
            return .refused(404, "ChannelNotRegistered")
        }
        switch headers.method {
        case "GET":
            let policy = channel.keepsLatest ? 1 : 0
            return .raw(
                .init(
                    status: "200", headers: [requestID],
                    body: Array("{\"message-storage-policy\":\(policy),\"push-type\":\"LiveActivity\"}".utf8)))
        case "DELETE":
            channels.withLock { $0[app]?.removeAll { $0.id == id } }
            return .raw(.init(status: "204", headers: [requestID]))
        default: return .refused(405, "MethodNotAllowed")
        }
    }

    private func broadcast(
        _ headers: RequestHeaders, to app: String, _ body: ByteBuffer, _ requestID: (String, String)
    ) -> FakeAnswer {
        guard let id = headers.channelID else { return .refused(400, "MissingChannelId") }
        guard let channel = all(of: app).first(where: { $0.id == id }) else {
            return .refused(404, "ChannelNotRegistered")
        }
        if headers.pushType?.lowercased() != "liveactivity" { return .refused(400, "InvalidPushType") }
        guard let expiration = headers.expiration.flatMap(Int64.init), channel.keepsLatest || expiration == 0 else {
            return .refused(400, "BadExpirationDate")
        }
        guard body.readableBytes > 0 else { return .refused(400, "PayloadEmpty") }
        return .raw(.init(status: "200", headers: [requestID]))
    }
}
