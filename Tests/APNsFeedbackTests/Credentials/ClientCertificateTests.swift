import Foundation
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

/// The extensions of such a certificate, as Apple's "Communicating with APNs" shows them.
let appleExtensions = """
    1.2.840.113635.100.6.3.1 = DER:0500
    1.2.840.113635.100.6.3.2 = DER:0500
    1.2.840.113635.100.6.3.6 = ASN1:SEQUENCE:topics
    [topics]
    0 = UTF8:com.example.app
    1 = SEQUENCE:app
    2 = UTF8:com.example.app.voip
    3 = SEQUENCE:voip
    4 = UTF8:com.example.app.complication
    5 = SEQUENCE:complication
    [app]
    0 = UTF8:app
    [voip]
    0 = UTF8:voip
    [complication]
    0 = UTF8:complication
    """

@Suite(.ownThread) struct `A client certificate` {
    private let workshop: Workshop

    init() throws { workshop = try Workshop() }

    private func pem(_ name: String, key: String? = nil, password: String? = nil, at now: Instant = anHourFromNow)
        throws
        -> ClientCertificate
    {
        try ClientCertificate(
            pem: workshop.read(name), key: key.map { try workshop.read($0) }, password: password, at: now)
    }

    /// pushy#292, PushSharp#219: Keychain Access exports the old and the renewed identity, or another one beside it.
    @Test(arguments: ["pem", "p12"])
    func `of several identities in a file, the one for the topic that is valid is taken`(form: String) throws {
        func topics(_ topic: String) -> String {
            "1.2.840.113635.100.6.3.6 = ASN1:SEQUENCE:topics\n[topics]\n0 = UTF8:\(topic)\n1 = SEQUENCE:app\n[app]\n0 = UTF8:app"
        }
        try workshop.makeCertificate("old", days: "-days 2", extensions: topics("com.example.app"))
        try workshop.makeCertificate("other", extensions: topics("com.example.other"))
        try workshop.makeCertificate("new", extensions: topics("com.example.app"))
        try workshop.run("cat old.pem old.key other.pem other.key new.pem new.key > all.pem")
        let day = Instant.now.advanced(byMicroseconds: 10 * 86_400_000_000)
        func certificate(for names: [String]) throws -> ClientCertificate {
            if form == "pem" {
                return try ClientCertificate(pem: SecretBytes(workshop.read("all.pem")), at: day, for: names)
            }
            try workshop.makeArchive(of: ["old", "other", "new"], to: "all.p12")
            return try ClientCertificate(
                pkcs12: SecretBytes(workshop.read("all.p12")), password: nil, at: day, for: names)
        }
        let new = try certificate(for: ["com.example.app"])
        #expect(new.topics == ["com.example.app"] && new.expiresAt > day)
        #expect(try certificate(for: ["com.example.other"]).topics == ["com.example.other"])
        #expect(try certificate(for: []).expiresAt > day, "any that is valid")
    }

    @Test func `of a production and a sandbox identity, the one for the environment is taken`() throws {
        try workshop.makeCertificate("live", extensions: "1.2.840.113635.100.6.3.2 = DER:0500")
        try workshop.makeCertificate("sandbox", days: "-days 60", extensions: "1.2.840.113635.100.6.3.1 = DER:0500")
        try workshop.run("cat sandbox.pem sandbox.key live.pem live.key > all.pem")
        for environment in Environment.allCases {
            let taken = try ClientCertificate(
                pem: SecretBytes(workshop.read("all.pem")), at: .now, for: ["com.example.*"], in: [environment])
            #expect(taken.environments == [environment])
        }
    }

    @Test func `a file in UTF-16, in base64, or with escaped ends of lines is read as it was`() throws {
        try workshop.makeCertificate()
        try workshop.run("cat push.pem push.key > all.pem")
        try workshop.makeArchive(of: ["push"], to: "all.p12")
        let (pem, archive) = (try workshop.read("all.pem"), try workshop.read("all.p12"))
        let text = String(decoding: pem, as: UTF8.self)
        let forms: [(String, [UInt8])] = [
            ("as it is", pem), ("UTF-16", [0xFF, 0xFE] + text.utf16.flatMap { [UInt8($0 & 0xFF), UInt8($0 >> 8)] }),
            ("escaped", Array(text.replacingOccurrences(of: "\n", with: "\\n").utf8)),
            ("JSON", Array(("\"" + text.replacingOccurrences(of: "\n", with: "\\n") + "\"").utf8)),
            ("escaped, too", Array(text.replacingOccurrences(of: "\n", with: "\\r\\n").utf8)),
            ("base64", Array(Data(pem).base64EncodedString(options: .lineLength64Characters).utf8)),
        ]
        for (name, bytes) in forms {
            let plain = KeyText.plain(SecretBytes(bytes))
            #expect(throws: Never.self, "\(name)") { try ClientCertificate(pem: plain, at: .now) }
        }
        for bytes in [archive, Array(Data(archive).base64EncodedString().utf8)] {
            let plain = KeyText.plain(SecretBytes(bytes))
            #expect(throws: Never.self) { try ClientCertificate(pkcs12: plain, password: nil, at: .now) }
        }
    }

    @Test func `it takes topics and environments from Apple's extensions`() throws {
        try workshop.makeCertificate(extensions: appleExtensions)
        let certificate = try pem("push.pem", key: "push.key")
        #expect(certificate.name == "Apple Push Services: com.example.app")
        #expect(certificate.topics == ["com.example.app", "com.example.app.voip", "com.example.app.complication"])
        #expect(certificate.environments == [.production, .sandbox])
    }

    @Test func `VoIP topics have a separate extension`() throws {
        let list = "DER:301e 0c14 636f6d2e6578616d706c652e6170702e766f6970 3006 0c04 766f6970".replacingOccurrences(
            of: " ", with: "")
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.4 = \(list)")
        #expect(try pem("push.pem", key: "push.key").topics == ["com.example.app.voip"])
        try workshop.makeCertificate(
            "both", extensions: "1.2.840.113635.100.6.3.4 = \(list)\n" + appleExtensions)
        #expect(
            try pem("both.pem", key: "both.key").topics.sorted() == [
                "com.example.app", "com.example.app.complication", "com.example.app.voip",
            ])
    }

    @Test func `without a list of topics, its only topic is the UID of the subject`() throws {
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.2 = DER:0500")
        let certificate = try pem("push.pem", key: "push.key")
        #expect(certificate.topics == ["com.example.app"])
        #expect(certificate.environments == [.production])
        try workshop.makeCertificate("sandbox", extensions: "1.2.840.113635.100.6.3.1 = DER:0500")
        #expect(try pem("sandbox.pem", key: "sandbox.key").environments == [.sandbox])
    }

    @Test func `a certificate without extensions has no topics and is valid in both environments`() throws {
        try workshop.makeCertificate(subject: "/O=Example")
        let certificate = try pem("push.pem", key: "push.key")
        #expect(certificate.topics.isEmpty)
        #expect(certificate.name.isEmpty)
        #expect(certificate.environments == [.production, .sandbox])
    }

    @Test(arguments: [
        "DER:0500", "DER:30", "DER:3005", "DER:30820fff0c0161", "DER:0c0161", "DER:30020c00", "DER:30840000000000",
    ])
    func `a malformed list of topics counts as none`(value: String) throws {
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.6 = \(value)")
        #expect(try pem("push.pem", key: "push.key").topics == ["com.example.app"])
    }

    @Test func `a list of a hundred topics is read`() throws {
        let topics = (0..<100).map { "com.example.app\($0)" }
        let list = topics.enumerated().map { "\($0) = UTF8:\($1)" }.joined(separator: "\n")
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.6 = ASN1:SEQUENCE:topics\n[topics]\n\(list)")
        #expect(try pem("push.pem", key: "push.key").topics == topics)
    }

    @Test func `it reads the dates of the certificate, even beyond 2050`() throws {
        try workshop.run(
            """
            openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout k.pem -subj /CN=x -out r.pem
            touch index && echo 01 > serial
            printf '[ca]\\ndefault_ca=d\\n[d]\\ndatabase=index\\nserial=serial\\nnew_certs_dir=.\\ndefault_md=sha256\\npolicy=p\\n[p]\\n' > ca.conf
            printf 'commonName=supplied\\n' >> ca.conf
            openssl ca -batch -config ca.conf -selfsign -keyfile k.pem -in r.pem -out c.pem -notext \
                -startdate 20240102030405Z -enddate 20600102030405Z
            """)
        let certificate = try pem("c.pem", key: "k.pem")
        #expect(certificate.validFrom == Instant(microseconds: 1_704_164_645_000_000))
        #expect(certificate.expiresAt == Instant(microseconds: 2_840_238_245_000_000))
    }

    @Test func `its description does not contain the key`() throws {
        try workshop.makeCertificate()
        let certificate = try pem("push.pem", key: "push.key")
        #expect("\(certificate)".hasPrefix("the certificate 'Apple Push Services: com.example.app', valid until 20"))
        let key = "\(certificate.keyPEM.unprotected)".dropFirst().prefix(100)
        let text = String(decoding: certificate.keyPEM.unprotected, as: UTF8.self).split(separator: "\n")[1]
        let printed = "\(certificate) \(certificate.keyPEM) \(String(reflecting: [certificate]))"
        #expect(!printed.contains(key) && !printed.contains(text))
    }

    @Test func `it reads certificate and key from one file or two, in any order, between other text`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            "cat push.pem push.key > one.pem; (echo 'Bag Attributes'; cat push.key; echo; cat push.pem) > two.pem")
        try workshop.expectUsable(pem("one.pem"))
        try workshop.expectUsable(pem("two.pem"))
        try workshop.expectUsable(pem("push.pem", key: "push.key"))
        try workshop.expectUsable(pem("push.pem", key: "push.key", password: "that is not needed"))
    }

    @Test func `it reads an RSA key, as used by Apple's certificates, in both formats`() throws {
        try workshop.run(
            """
            openssl req -new -x509 -newkey rsa:2048 -nodes -keyout rsa.key -out rsa.pem -subj /CN=x
            openssl rsa -in rsa.key -traditional -out old.key
            """)
        try workshop.expectUsable(pem("rsa.pem", key: "rsa.key"))
        try workshop.expectUsable(pem("rsa.pem", key: "old.key"))
    }

    @Test func `the key's certificate comes first, followed by its issuers`() throws {
        try workshop.makeCertificate("issuer", subject: "/CN=Issuer")
        try workshop.makeCertificate()
        try workshop.run("cat issuer.pem push.pem > chain.pem")
        let certificate = try pem("chain.pem", key: "push.key")
        #expect(certificate.name == "Apple Push Services: com.example.app")
        try workshop.expectUsable(certificate, certificates: 2)
    }

    @Test(arguments: [
        "openssl pkcs8 -topk8 -in push.key -passout pass:secret42",
        "openssl ec -in push.key -aes128 -passout pass:secret42",
    ])
    func `an encrypted key opens only with its password`(command: String) throws {
        try workshop.makeCertificate()
        try workshop.run("\(command) -out locked.key")
        try workshop.expectUsable(pem("push.pem", key: "locked.key", password: "secret42"))
        #expect(
            try refusal { try pem("push.pem", key: "locked.key") }
                == "the private key is encrypted and no password is given: set it")
        for wrong in ["", "secret43", String(repeating: "x", count: 5000)] {
            #expect(
                try refusal { try pem("push.pem", key: "locked.key", password: wrong) }
                    == "the password of the private key is wrong: correct it")
        }
    }

    @Test func `a key with encryption that OpenSSL 3 disables is refused with the command that converts it`()
        throws
    {
        try workshop.makeCertificate()
        try workshop.run(
            """
            openssl pkcs8 -topk8 -in push.key -v1 PBE-SHA1-RC2-40 -provider legacy -provider default \
            -passout pass:secret42 -out old.pem
            """)
        let message = try refusal { try pem("push.pem", key: "old.pem", password: "secret42") }
        #expect(
            message.hasPrefix(
                "the private key is encrypted with an algorithm that OpenSSL 3 disables by default: `openssl pkey"))
        try workshop.run(
            """
            openssl pkey -provider legacy -provider default -in old.pem -aes256 -out new.pem \
            -passin pass:secret42 -passout pass:secret42
            """)
        try workshop.expectUsable(pem("push.pem", key: "new.pem", password: "secret42"))
    }

    @Test func `the key of another certificate is refused`() throws {
        try workshop.makeCertificate()
        _ = try workshop.makeKey("other.key")
        #expect(
            try refusal { try pem("push.pem", key: "other.key") }.hasPrefix(
                "the private key does not belong to the certificate 'Apple Push Services: com.example.app'"))
    }

    @Test func `the error names the missing certificate or key`() throws {
        try workshop.makeCertificate()
        try workshop.write("garbage".utf8, to: "garbage")
        try workshop.run("openssl pkey -in push.key -pubout -out public.pem")
        #expect(try refusal { try pem("push.pem") }.hasPrefix("the PEM has no private key"))
        #expect(try refusal { try pem("push.pem", key: "public.pem") }.hasPrefix("the PEM has no private key"))
        #expect(try refusal { try pem("push.key") }.hasPrefix("the PEM has no certificate"))
        #expect(try refusal { try pem("garbage") }.hasPrefix("no PEM was found"))
        try workshop.run("sed 5d push.pem > damaged.pem; sed 2d push.key > damaged.key")
        #expect(
            try refusal { try pem("damaged.pem", key: "push.key") }.hasPrefix("certificate 1 of the PEM is damaged"))
        #expect(
            try refusal { try pem("push.pem", key: "damaged.key") } == "the private key is damaged: export it again")
    }

    @Test func `a certificate that has expired or is not valid yet is refused with the date`() throws {
        try workshop.makeCertificate()
        let certificate = try pem("push.pem", key: "push.key")
        let after = certificate.expiresAt.advanced(byMicroseconds: 1)
        let before = certificate.validFrom.advanced(byMicroseconds: -1)
        for edge in [certificate.validFrom, certificate.expiresAt] {
            #expect(throws: Never.self) { try pem("push.pem", key: "push.key", at: edge) }
        }
        let day = Date(timeIntervalSince1970: Double(certificate.expiresAt.microseconds) / 1e6).formatted(.iso8601)
        let expired = "the certificate 'Apple Push Services: com.example.app' expired at \(day): create a new one"
        #expect(try refusal { try pem("push.pem", key: "push.key", at: after) }.hasPrefix(expired))
        #expect(try refusal { try pem("push.pem", key: "push.key", at: before) }.contains("is not valid before 20"))
        #expect(throws: CredentialError.self) { try certificate.requireValidity(at: after) }
    }

}
