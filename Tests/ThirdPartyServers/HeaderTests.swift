import APNsFeedback
import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

/// What a server of others reads from the client, compared with what Apple asks for.
@Suite(.ownThread, .serialized) struct `The client's requests, as nghttpd reads them` {
    /// A field of Apple's table, with the form of its value.
    private struct Rule {
        var name: String
        var isRequired = false
        var form: @Sendable (String) -> Bool
        /// How the field is encoded in the first request that has it.
        var first = repeated
        /// The same for later requests.
        var later = repeated
    }

    /// A field that repeats: a literal that enters the table, or a reference to it.
    private static let repeated: Set<NghttpdLog.Form> = [.added, .indexed]
    private static let never: Set<NghttpdLog.Form> = [.notIndexed, .neverIndexed]

    /// "Sending notification requests to APNs", the tables of pseudo headers and headers, and the list on HPACK:
    /// https://developer.apple.com/documentation/usernotifications/sending-notification-requests-to-apns
    /// `:scheme` and `:authority` are those of RFC 9113, 8.3.1, and `content-length` that of RFC 9110, 8.6.
    private static let page: [Rule] = [
        Rule(name: ":method", isRequired: true) { $0 == "POST" },
        Rule(name: ":scheme", isRequired: true) { $0 == "https" },
        Rule(name: ":authority", isRequired: true) { $0.wholeMatch(of: #/127\.0\.0\.1:[0-9]+/#) != nil },
        Rule(
            name: ":path", isRequired: true, form: { $0.wholeMatch(of: #/\/3\/device\/([0-9a-f]{2})+/#) != nil },
            first: never, later: never),
        Rule(
            name: "authorization", form: { $0.wholeMatch(of: #/bearer [\w-]+\.[\w-]+\.[\w-]+/#) != nil },
            first: never, later: never),
        Rule(name: "apns-topic", isRequired: true) { $0.wholeMatch(of: #/[A-Za-z0-9.-]+/#) != nil },
        Rule(name: "apns-push-type", isRequired: true) { pushTypes.contains($0) },
        Rule(
            name: "apns-id", isRequired: true,
            form: { $0.wholeMatch(of: #/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/#) != nil },
            first: [.added], later: never),
        Rule(name: "apns-priority") { ["10", "5", "1"].contains($0) },
        Rule(
            name: "apns-expiration", form: { $0.wholeMatch(of: #/0|[1-9][0-9]*/#) != nil }, first: [.added],
            later: never),
        Rule(name: "apns-collapse-id", form: { 1...64 ~= $0.utf8.count }, first: [.added], later: never),
        Rule(
            name: "content-length", isRequired: true, form: { $0.wholeMatch(of: #/[1-9][0-9]*/#) != nil }, first: never,
            later: never),
    ]

    private static let pushTypes: Set = [
        "alert", "background", "voip", "complication", "fileprovider", "mdm", "liveactivity", "location", "pushtotalk",
        "widgets", "controls",
    ]

    /// Requests of each kind: every push type, every priority, with and without each optional header, short and long tokens.
    private static let requests: [PushRequest] = {
        var all: [PushRequest] = []
        func add(
            _ type: PushType = .alert, _ payload: String = #"{"aps":{"alert":"Hello"}}"#, token: Int = 32,
            _ change: (inout PushRequest) -> Void = { _ in }
        ) {
            let number = all.count + 1
            var request = PushRequest(
                address: TokenAddress(
                    environment: .production, topic: Topic("com.example.app")!,
                    token: DeviceToken(hex: String(repeating: "AB", count: token - 1) + String(format: "%02X", number))!
                ),
                payload: Array(payload.utf8), pushType: type,
                id: "0a1b2c3d-0000-4000-8000-" + String(format: "%012x", number))
            change(&request)
            all.append(request)
        }
        let background = #"{"aps":{"content-available":1}}"#
        add()
        add(.background, background) { $0.priority = 5 }
        for priority in [10, 5, 1] { add { $0.priority = priority } }
        for expiration in [0, 1_900_000_000, 1_900_000_001] { add { $0.expiration = Int64(expiration) } }
        for length in [1, 64] { add { $0.collapseID = String(repeating: "c", count: length) } }
        add {
            ($0.priority, $0.expiration, $0.collapseID) = (10, 1_900_000_000, "a thread")
        }
        for type in PushType.allCases where type != .background { add(type) }
        add(token: 1)
        add(token: 128)
        add(.alert, #"{"aps":{"alert":""# + String(repeating: "ü", count: 2000) + #""}}"#)
        // Once more what came first: nothing must stick from the others.
        add()
        return all
    }()

    private static func send(_ requests: [PushRequest], _ identity: PushIdentity, _ authority: TestAuthority) throws
        -> [NghttpdLog.Request]
    {
        let server = try ServerProcess(.nghttpd, authority)
        try server.start()
        var options = PushClientOptions(
            servers: [.production: PushServer(host: "127.0.0.1", port: server.port)],
            authorityFile: authority.certificate)
        // One after the other: the streams have the order of the requests.
        options.connections = 1
        options.inFlight = 1
        for outcome in try sendAll(requests, identity, options) {
            guard case .answered(let answer) = outcome.end, answer.status == 200 else {
                throw TestFailure("\(outcome.end): \(server.log)")
            }
        }
        return try NghttpdLog(server.log).requests
    }

    @Test(arguments: [true, false])
    func `each header is one that Apple names, in Apple's form, and no other is sent`(_ hasProviderToken: Bool) throws {
        let authority = try TestAuthority()
        let token = try authority.providerToken()
        let identity = hasProviderToken ? PushIdentity(authorization: { token }) : PushIdentity()
        let sent = try Self.send(Self.requests, identity, authority)
        try #require(sent.count == Self.requests.count)

        var earlier: Set<String> = []
        for (wanted, read) in zip(Self.requests, sent) {
            let names = read.fields.map(\.name)
            #expect(Set(names).count == names.count, "no header comes twice: \(names)")
            #expect(Array(names.prefix(4)) == [":method", ":scheme", ":authority", ":path"], "first, and no others")
            for field in read.fields {
                guard let rule = Self.page.first(where: { $0.name == field.name }) else {
                    Issue.record("Apple's page does not name \(field.name)")
                    continue
                }
                #expect(rule.form(field.value), "\(field.name): \(field.value)")
                let forms = earlier.contains(field.name) ? rule.later : rule.first
                #expect(forms.contains(field.form), "\(field.name) is encoded as \(field.form)")
                earlier.insert(field.name)
            }
            for rule in Self.page where rule.isRequired { #expect(names.contains(rule.name)) }
            checkValues(read, of: wanted, authorization: hasProviderToken ? "bearer \(token)" : nil)
        }
        #expect(earlier.union(["authorization"]) == Set(Self.page.map(\.name)), "each rule was used")
    }

    /// The values are those of the request, and what it does not set is absent.
    private func checkValues(_ read: NghttpdLog.Request, of wanted: PushRequest, authorization: String?) {
        let hex = wanted.address.token.bytes.map { String(format: "%02x", $0) }.joined()
        let expected: [(String, String?)] = [
            (":path", "/3/device/\(hex)"), ("authorization", authorization), ("apns-topic", wanted.address.topic.name),
            ("apns-push-type", wanted.pushType.rawValue), ("apns-id", wanted.id),
            ("apns-priority", wanted.priority.map(String.init)),
            ("apns-expiration", wanted.expiration.map { String($0) }), ("apns-collapse-id", wanted.collapseID),
            ("content-length", String(wanted.payload.count)),
        ]
        for (name, value) in expected { #expect(read.field(name)?.value == value, "\(name)") }
        #expect(read.payload == wanted.payload)
        // The server's log says so, too.
        #expect(read.field("authorization")?.isSensitive != false, "the provider token is marked for proxies")
    }
}
