import Foundation
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

@Suite(.ownThread) struct `A client certificate in PKCS#12` {
    private let workshop: Workshop

    init() throws { workshop = try Workshop() }

    private func pkcs12(_ name: String, password: String? = nil) throws -> ClientCertificate {
        try ClientCertificate(pkcs12: workshop.read(name), password: password, at: anHourFromNow)
    }

    @Test func `a PKCS#12 file opens only with its password`() throws {
        try workshop.makeCertificate(extensions: appleExtensions)
        try workshop.makeCertificate("issuer", subject: "/CN=Issuer")
        try workshop.run(
            """
            openssl pkcs12 -export -in push.pem -inkey push.key -certfile issuer.pem \
            -out push.p12 -passout pass:secret42-Schlüssel
            """)
        let certificate = try pkcs12("push.p12", password: "secret42-Schlüssel")
        #expect(certificate.topics.count == 3)
        try workshop.expectUsable(certificate, certificates: 2)
        #expect(
            try refusal { try pkcs12("push.p12") }
                == "the PKCS#12 file is protected by a password and none is given: set it")
        for wrong in ["", "secret42"] {
            #expect(
                try refusal { try pkcs12("push.p12", password: wrong) }.hasPrefix(
                    "the password of the PKCS#12 file is wrong"))
        }
        #expect(try refusal { try pkcs12("push.p12", password: "secret42\0") }.contains("NUL"))
    }

    @Test func `a PKCS#12 file without a password opens without one`() throws {
        try workshop.makeCertificate()
        try workshop.run("openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:")
        try workshop.run(
            "openssl pkcs12 -export -in push.pem -inkey push.key -out bare.p12 -passout pass: -keypbe NONE -certpbe NONE -nomac"
        )
        for name in ["push.p12", "bare.p12"] {
            try workshop.expectUsable(pkcs12(name))
            try workshop.expectUsable(pkcs12(name, password: ""))
        }
    }

    @Test func `an old PKCS#12 file with triple DES opens: OpenSSL 3 still reads it`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            """
            openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:secret42 \
            -keypbe PBE-SHA1-3DES -certpbe PBE-SHA1-3DES -macalg sha1
            """)
        try workshop.expectUsable(pkcs12("push.p12", password: "secret42"))
    }

    @Test func `a PKCS#12 file with RC2-40 is refused by that name, with commands that convert it`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            "openssl pkcs12 -export -legacy -in push.pem -inkey push.key -out old.p12 -passout pass:secret42")
        let message = try refusal { try pkcs12("old.p12", password: "secret42") }
        #expect(message.hasPrefix("the PKCS#12 file is encrypted with RC2-40, which OpenSSL 3 disables by default"))
        let commands = message.split(separator: "`").filter { $0.hasPrefix("openssl ") }
        try #require(
            commands == [
                "openssl pkcs12 -legacy -in old.p12 -nodes -out push.pem",
                "openssl pkcs12 -export -in push.pem -out new.p12",
            ])
        try workshop.run("\(commands[0]) -passin pass:secret42")
        try workshop.expectUsable(ClientCertificate(pem: workshop.read("push.pem"), at: anHourFromNow))
        try workshop.run("\(commands[1]) -passout pass:secret42")
        try workshop.expectUsable(pkcs12("new.p12", password: "secret42"))
        // A wrong password is detected first: the checksum does not use RC2-40.
        #expect(
            try refusal { try pkcs12("old.p12", password: "wrong") }.hasPrefix(
                "the password of the PKCS#12 file is wrong"))
    }

    @Test func `the error names what a PKCS#12 file lacks`() throws {
        try workshop.makeCertificate()
        _ = try workshop.makeKey("other.key")
        try workshop.run(
            """
            openssl pkcs12 -export -nokeys -in push.pem -out certificate.p12 -passout pass:secret42
            openssl pkcs12 -export -nocerts -inkey push.key -out key.p12 -passout pass:secret42
            """)
        #expect(
            try refusal { try pkcs12("certificate.p12", password: "secret42") }.hasPrefix(
                "the PKCS#12 file has no private key"))
        #expect(
            try refusal { try pkcs12("key.p12", password: "secret42") }.hasPrefix(
                "found a private key without a certificate"))
    }

    @Test func `the error names what a file is if it is not PKCS#12`() throws {
        try workshop.makeCertificate()
        try workshop.run("openssl x509 -in push.pem -outform der -out push.cer; printf 'garbage' > garbage; : > empty")
        #expect(
            try refusal { try pkcs12("push.pem") } == "the file is not a PKCS#12 file, it is PEM: configure it as PEM")
        #expect(try refusal { try pkcs12("push.cer") }.contains("it is a certificate without its private key"))
        #expect(try refusal { try pkcs12("garbage") }.contains("it is damaged or of another format"))
        #expect(try refusal { try pkcs12("empty") }.contains("it is damaged or of another format"))
    }

    @Test func `a PKCS#12 file with one corrupted byte is refused or reads the same`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            "openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:secret42 -iter 1 -nomaciter"
        )
        let whole = try workshop.read("push.p12")
        let name = try ClientCertificate(pkcs12: whole, password: "secret42", at: anHourFromNow).name
        for place in whole.indices {
            var bytes = whole
            bytes[place] ^= 0x01
            if let read = try? ClientCertificate(pkcs12: bytes, password: "secret42", at: anHourFromNow) {
                #expect(read.name == name)
            }
            #expect(throws: CredentialError.self) {
                try ClientCertificate(pkcs12: Array(whole.prefix(place)), password: "secret42", at: anHourFromNow)
            }
        }
    }
}
