import FakeAPNs
import Foundation
import TestThreads
import Testing

@Suite("Client certificates take the place of JWTs", .ownThread)
struct CertificateTests {
    private func start() throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.clientAuthority = Fixture.authority.certificate
        return try FakeAPNs.start(options)
    }

    private func request(_ identity: TestAuthority.Identity, topic: String? = "com.example.app") throws -> CurlRequest {
        try Fixture.request {
            $0.authorization = nil
            $0.headers = [("apns-topic", topic)]
            $0.arguments = ["--cert", identity.certificate, "--key", identity.key]
        }
    }

    @Test func `a certificate of the authority needs no JWT, and is valid for its topic and the topics below it`()
        throws
    {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let identity = try Fixture.authority.clientCertificate("trusted", topic: "com.example.app")
        #expect(try apns.send(request(identity)).status == 200)
        #expect(try apns.send(request(identity, topic: "com.example.app.voip")).status == 200)
        #expect(try apns.send(request(identity, topic: nil)).status == 200)
        #expect(apns.records.exchanges.last?.request.topic == "com.example.app")
        #expect(try apns.send(request(identity, topic: "com.example.apple")).body == "{\"reason\":\"TopicDisallowed\"}")
        let any = try Fixture.authority.clientCertificate("any")
        #expect(try apns.send(request(any, topic: "com.example.apple")).status == 200)
        #expect(try apns.send(request(any, topic: nil)).body == "{\"reason\":\"MissingTopic\"}")
    }

    @Test func `an expired certificate, and one of another authority, get BadCertificate`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let expired = try Fixture.authority.clientCertificate("expired", days: -1)
        let foreign = try TestAuthority()
        for identity in [expired, try foreign.clientCertificate("foreign")] {
            let answer = try apns.send(request(identity))
            #expect(answer.status == 403)
            #expect(answer.body == "{\"reason\":\"BadCertificate\"}")
        }
    }

    @Test func `without a certificate, a JWT is required and sufficient`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        #expect(try apns.send(Fixture.request()).status == 200)
        let answer = try apns.send(Fixture.request { $0.authorization = nil })
        #expect(answer.body == "{\"reason\":\"MissingProviderToken\"}")
    }

    @Test func `PKCS#12 files can be made, and old ones that OpenSSL 3 reads with its legacy provider only`() throws {
        let authority = Fixture.authority
        let identity = try authority.clientCertificate("sealed", topic: "com.example.app")
        let modern = try authority.pkcs12(of: identity, password: "secret")
        let old = try authority.pkcs12(of: identity, password: "secret", legacy: true)
        let read = ["openssl", "pkcs12", "-nodes", "-passin", "pass:secret", "-in"]
        #expect(try CurlRequest.run(read + [modern]).exit == 0)
        #expect(try CurlRequest.run(read + [old]).exit != 0)
        #expect(try CurlRequest.run(read + [old, "-legacy"]).exit == 0)

        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let answer = try apns.send(
            Fixture.request {
                $0.authorization = nil
                $0.arguments = ["--cert-type", "P12", "--cert", modern + ":secret"]
            })
        #expect(answer.status == 200, "\(answer.complaint)")
    }
}
