import FakeAPNs
import Foundation
import TestThreads
import Testing

@Suite("Provider tokens are checked as APNs checks them", .ownThread)
struct ProviderTokenTests {
    private let clock = HandClock()

    private func start(_ change: (inout FakeOptions) -> Void = { _ in }) throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.now = { [clock] in clock.now }
        change(&options)
        return try FakeAPNs.start(options)
    }

    /// The body of the answer to a request with this `authorization`, or `200`.
    private func answer(_ apns: FakeAPNs, _ authorization: String?) throws -> String {
        let answer = try apns.send(Fixture.request { $0.authorization = authorization })
        return answer.status == 200 ? "200" : "\(answer.status ?? 0) \(answer.body)"
    }

    private static let missing = "403 {\"reason\":\"MissingProviderToken\"}"
    private static let invalid = "403 {\"reason\":\"InvalidProviderToken\"}"
    private static let expired = "403 {\"reason\":\"ExpiredProviderToken\"}"

    @Test func `without a JWT, or with another scheme, it is missing`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        #expect(try answer(apns, nil) == Self.missing)
        #expect(try answer(apns, "basic abc") == Self.missing)
    }

    @Test func `a JWT of an unknown key, another team, algorithm or signature, or with iat as a text, is invalid`()
        throws
    {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let now = clock.now / 1000
        let header = "{\"alg\":\"ES256\",\"kid\":\"FAKE123456\"}"
        let claims = "{\"iss\":\"TEAM123456\",\"iat\":\(now)}"
        let authority = Fixture.authority
        let right = try authority.providerToken(header: header, claims: claims)
        #expect(try answer(apns, "bearer " + right) == "200")

        let other = try authority.makeKey(id: "OTHER23456", team: "TEAM123456")
        let tampered = right.replacing(
            right.split(separator: ".")[1], with: right.split(separator: ".")[0], maxReplacements: 1)
        let wrong = [
            "abc", "a.b.c", "", right + ".x", String(right.dropLast(4)), tampered,
            try authority.providerToken(header: header, claims: claims, keyFile: other.file),
            try authority.providerToken(issuedAt: now, key: other),
            try authority.providerToken(header: "{\"alg\":\"RS256\",\"kid\":\"FAKE123456\"}", claims: claims),
            try authority.providerToken(header: "{\"alg\":\"none\",\"kid\":\"FAKE123456\"}", claims: claims),
            try authority.providerToken(header: "{\"alg\":\"ES256\"}", claims: claims),
            try authority.providerToken(header: header, claims: "{\"iss\":\"TEAM999999\",\"iat\":\(now)}"),
            try authority.providerToken(header: header, claims: "{\"iss\":\"TEAM123456\",\"iat\":\"\(now)\"}"),
            try authority.providerToken(header: header, claims: "{\"iss\":\"TEAM123456\",\"iat\":true}"),
            try authority.providerToken(header: header, claims: "{\"iss\":\"TEAM123456\"}"),
        ]
        for token in wrong where !token.isEmpty {
            #expect(try answer(apns, "bearer " + token) == Self.invalid, "\(token)")
        }
    }

    @Test func `a JWT is good for an hour, also one that was seen before`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let token = try Fixture.bearer(issuedAt: clock.now / 1000)
        #expect(try answer(apns, token) == "200")
        clock.advance(seconds: 3600)
        #expect(try answer(apns, token) == "200")
        clock.advance(seconds: 1)
        #expect(try answer(apns, token) == Self.expired)
        #expect(try answer(apns, Fixture.bearer(issuedAt: clock.now / 1000 + 300)) == "200")
        #expect(try answer(apns, Fixture.bearer(issuedAt: clock.now / 1000 + 301)) == Self.expired)
    }

    @Test func `a new JWT within 20 minutes of the previous one is refused if the server enforces it`() throws {
        let apns: FakeAPNs = try start { $0.tokenUpdates = .every20MinutesPerServer }
        defer { apns.stop() }
        let first = try Fixture.bearer(issuedAt: clock.now / 1000)
        #expect(try answer(apns, first) == "200")
        clock.advance(seconds: 1199)
        let second = try Fixture.bearer(issuedAt: clock.now / 1000)
        #expect(try answer(apns, second) == "429 {\"reason\":\"TooManyProviderTokenUpdates\"}")
        #expect(try answer(apns, first) == "200")
        clock.advance(seconds: 1)
        #expect(try answer(apns, second) == "200")
        #expect(try answer(apns, first) == "200")
    }

    @Test func `a JWT of a second team is refused on a connection that has seen the first, and accepted on its own`()
        async throws
    {
        let other = try Fixture.authority.makeKey(id: "OTHERTEAM1", team: "TEAM654321")
        let apns: FakeAPNs = try start { $0.signingKeys.append(other.key) }
        defer { apns.stop() }
        let now = clock.now / 1000
        let ours = try Fixture.bearer(issuedAt: now)
        let theirs = "bearer " + (try Fixture.authority.providerToken(issuedAt: now, key: other))
        #expect(try answer(apns, theirs) == "200")

        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.status(client.post(authorization: ours)) == "200")
        #expect(try await client.status(client.post(authorization: theirs)) == "403")
        #expect(try await client.status(client.post(authorization: ours)) == "200")
        #expect(apns.records.count(403, "InvalidProviderToken") == 1)
        await client.close()
    }

    @Test func `an open server asks for no JWT`() throws {
        let apns: FakeAPNs = try start { $0.requiresProviderToken = false }
        defer { apns.stop() }
        #expect(try answer(apns, nil) == "200")
    }
}
