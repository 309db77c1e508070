import Foundation
import Testing
import TokenModel

@testable import APNsFeedback

/// A certificate is valid from the second in which it is created.
let anHourFromNow = Instant(microseconds: (Int64(Date().timeIntervalSince1970) + 3600) * 1_000_000)

/// The message with which a certificate is refused: one line, without the password.
func refusal(_ load: () throws -> ClientCertificate) throws -> String {
    let message = try #require(throws: CredentialError.self) { try load() }.message
    #expect(!message.contains("\n"))
    #expect(!message.contains("secret42"))
    return message
}

extension Workshop {
    /// Expects that libcurl finds what it needs, and nothing encrypted.
    func expectUsable(_ certificate: ClientCertificate, certificates: Int = 1) throws {
        try write(certificate.chainPEM, to: "out.chain")
        try write(certificate.keyPEM.unprotected, to: "out.key")
        let ofChain = try run("openssl x509 -in out.chain -noout -pubkey")
        let ofKey = try run("openssl pkey -in out.key -passin pass: -pubout")
        #expect(ofChain == ofKey)
        let chain = String(decoding: certificate.chainPEM, as: UTF8.self)
        #expect(chain.components(separatedBy: "BEGIN CERTIFICATE").count == certificates + 1)
        #expect(certificate.keyPEM.unprotected.starts(with: "-----BEGIN PRIVATE KEY-----".utf8))
    }
}
