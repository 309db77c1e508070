import APNsFeedback
import Foundation
import LedgerTestSupport
import TokenModel

/// The same work for every client: the same payload to the same thousand tokens in turn, with the same headers and provider
/// token.
///
/// Its folder is deleted with the object.
final class SendingWork {
    let folder: String

    static let topic = "com.example.app"
    static let payload =
        #"{"aps":{"alert":{"title":"Breakfast","body":"Breakfast is ready, and still warm"},"sound":"default"}}"#
    static let tokens = 1000
    static let keyID = "FAKE123456"
    static let teamID = "TEAM123456"

    init() throws {
        folder = NSTemporaryDirectory() + "tk-sending-\(UUID().uuidString.prefix(8))"
        try FileManager.default.createDirectory(atPath: authority, withIntermediateDirectories: true)
        try Self.payload.write(toFile: payloadFile, atomically: true, encoding: .utf8)
        // nghttpd responds with 200 to a path that exists as a file.
        let devices = root + "/3/device"
        try FileManager.default.createDirectory(atPath: devices, withIntermediateDirectories: true)
        for number in 0..<Self.tokens {
            _ = FileManager.default.createFile(atPath: "\(devices)/\(Self.token(number))", contents: nil)
        }
    }

    deinit { try? FileManager.default.removeItem(atPath: folder) }

    /// The folder in which the fake APNs makes its certificates and key at its first start.
    var authority: String { folder + "/authority" }
    var authorityFile: String { authority + "/ca.pem" }
    var keyFile: String { authority + "/AuthKey_\(Self.keyID).p8" }
    var payloadFile: String { folder + "/payload.json" }
    /// The files that nghttpd serves.
    var root: String { folder + "/root" }

    /// - Parameter size: 21 or more; nil for the usual payload.
    static func payload(ofBytes size: Int?) -> String {
        guard let size else { return payload }
        let (start, end) = (#"{"aps":{"alert":""#, #""}}"#)
        return start + String(repeating: "x", count: size - start.utf8.count - end.utf8.count) + end
    }

    /// 64 hex digits without a pattern, like real tokens: a hash.
    static func token(_ number: Int) -> String {
        var state = UInt64(number % tokens) &* 0x9E37_79B9_7F4A_7C15 &+ 1
        var text = ""
        for _ in 0..<4 {
            state = (state ^ (state >> 30)) &* 0xBF58_476D_1CE4_E5B9
            state = (state ^ (state >> 27)) &* 0x94D0_49BB_1331_11EB
            state ^= state >> 31
            let digits = String(state, radix: 16)
            text += String(repeating: "0", count: 16 - digits.count) + digits
        }
        return text
    }

    /// The settings of a daemon that sends to the server.
    func daemonSettings(_ server: SendingServer) -> [String] {
        MeasuredDaemon.brisk + [
            "send.production_server=localhost:\(server.port)", "send.ca_file=\(authorityFile)",
            "credential.main.key_file=\(keyFile)", "credential.main.key_id=\(Self.keyID)",
            "credential.main.team_id=\(Self.teamID)", "credential.main.topics=com.example.*",
        ]
    }

    /// The provider token, without `bearer `.
    func providerToken() throws -> String {
        try Self.providerToken(keyFile: keyFile).text(at: .now)
    }

    static func providerToken(keyFile: String) throws -> ProviderToken {
        let key = try SigningKey(p8: SecretBytes(contentsOf: keyFile))
        return try ProviderToken(key: key, keyID: keyID, teamID: teamID)
    }

    /// A file of all URLs, one per line.
    func addresses(port: Int) throws -> String {
        let file = folder + "/addresses-\(port)"
        let lines = (0..<Self.tokens).map { "https://localhost:\(port)/3/device/\(Self.token($0))\n" }
        try lines.joined().write(toFile: file, atomically: true, encoding: .utf8)
        return file
    }
}
