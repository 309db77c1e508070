import Foundation
import Testing
import TokenModel

@testable import APNsFeedback

/// An hour from now: a certificate is valid from the second in which it is made.
private let now = Instant(microseconds: (Int64(Date().timeIntervalSince1970) + 3600) * 1_000_000)

/// What Apple's "Communicating with APNs" shows of such a certificate.
private let appleExtensions = """
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

@Suite struct `A client certificate` {
    private let workshop: Workshop

    init() throws { workshop = try Workshop() }

    private func refusal(_ load: () throws -> ClientCertificate) throws -> String {
        let message = try #require(throws: CredentialError.self) { try load() }.message
        #expect(!message.contains("\n"))
        #expect(!message.contains("secret42"))
        return message
    }

    private func pem(_ name: String, key: String? = nil, password: String? = nil, at now: Instant = now) throws
        -> ClientCertificate
    {
        try ClientCertificate(
            pem: workshop.read(name), key: key.map { try workshop.read($0) }, password: password, at: now)
    }

    private func pkcs12(_ name: String, password: String? = nil) throws -> ClientCertificate {
        try ClientCertificate(pkcs12: workshop.read(name), password: password, at: now)
    }

    /// That libcurl will find what it needs, and nothing encrypted.
    private func expectUsable(_ certificate: ClientCertificate, certificates: Int = 1) throws {
        try workshop.write(certificate.chainPEM, to: "out.chain")
        try workshop.write(certificate.keyPEM, to: "out.key")
        let ofChain = try workshop.run("openssl x509 -in out.chain -noout -pubkey")
        let ofKey = try workshop.run("openssl pkey -in out.key -passin pass: -pubout")
        #expect(ofChain == ofKey)
        let chain = String(decoding: certificate.chainPEM, as: UTF8.self)
        #expect(chain.components(separatedBy: "BEGIN CERTIFICATE").count == certificates + 1)
        #expect(certificate.keyPEM.starts(with: "-----BEGIN PRIVATE KEY-----".utf8))
    }

    // MARK: What it says

    @Test func `its topics and environments are those of Apple's extensions`() throws {
        try workshop.makeCertificate(extensions: appleExtensions)
        let certificate = try pem("push.pem", key: "push.key")
        #expect(certificate.name == "Apple Push Services: com.example.app")
        #expect(certificate.topics == ["com.example.app", "com.example.app.voip", "com.example.app.complication"])
        #expect(certificate.environments == [.production, .sandbox])
    }

    @Test func `without a list its only topic is the UID of the subject`() throws {
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.2 = DER:0500")
        let certificate = try pem("push.pem", key: "push.key")
        #expect(certificate.topics == ["com.example.app"])
        #expect(certificate.environments == [.production])
        try workshop.makeCertificate("sandbox", extensions: "1.2.840.113635.100.6.3.1 = DER:0500")
        #expect(try pem("sandbox.pem", key: "sandbox.key").environments == [.sandbox])
    }

    @Test func `a certificate that says nothing has no topics, and is of both environments`() throws {
        try workshop.makeCertificate(subject: "/O=Example")
        let certificate = try pem("push.pem", key: "push.key")
        #expect(certificate.topics.isEmpty)
        #expect(certificate.name.isEmpty)
        #expect(certificate.environments == [.production, .sandbox])
    }

    @Test(arguments: [
        "DER:0500", "DER:30", "DER:3005", "DER:30820fff0c0161", "DER:0c0161", "DER:30020c00", "DER:30840000000000",
    ])
    func `a list of topics that is malformed is as none`(value: String) throws {
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.6 = \(value)")
        #expect(try pem("push.pem", key: "push.key").topics == ["com.example.app"])
    }

    @Test func `a list of a hundred topics is read`() throws {
        let topics = (0..<100).map { "com.example.app\($0)" }
        let list = topics.enumerated().map { "\($0) = UTF8:\($1)" }.joined(separator: "\n")
        try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.6 = ASN1:SEQUENCE:topics\n[topics]\n\(list)")
        #expect(try pem("push.pem", key: "push.key").topics == topics)
    }

    @Test func `its dates are those of the certificate, beyond 2050 as well`() throws {
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

    @Test func `it is printed without its key`() throws {
        try workshop.makeCertificate()
        let certificate = try pem("push.pem", key: "push.key")
        #expect("\(certificate)".hasPrefix("the certificate 'Apple Push Services: com.example.app', valid until 20"))
        let key = "\(certificate.keyPEM)".dropFirst().prefix(100)
        #expect(!"\(Credential.certificate(certificate)) \(String(reflecting: [certificate]))".contains(key))
    }

    // MARK: PEM

    @Test func `certificate and key are read from one file or from two, in any order and between other text`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            "cat push.pem push.key > one.pem; (echo 'Bag Attributes'; cat push.key; echo; cat push.pem) > two.pem")
        try expectUsable(pem("one.pem"))
        try expectUsable(pem("two.pem"))
        try expectUsable(pem("push.pem", key: "push.key"))
        try expectUsable(pem("push.pem", key: "push.key", password: "that is not needed"))
    }

    @Test func `an RSA key, as Apple's certificates have, is read in both of its forms`() throws {
        try workshop.run(
            """
            openssl req -new -x509 -newkey rsa:2048 -nodes -keyout rsa.key -out rsa.pem -subj /CN=x
            openssl rsa -in rsa.key -traditional -out old.key
            """)
        try expectUsable(pem("rsa.pem", key: "rsa.key"))
        try expectUsable(pem("rsa.pem", key: "old.key"))
    }

    @Test func `the certificate of the key comes first, and its issuers after it`() throws {
        try workshop.makeCertificate("issuer", subject: "/CN=Issuer")
        try workshop.makeCertificate()
        try workshop.run("cat issuer.pem push.pem > chain.pem")
        let certificate = try pem("chain.pem", key: "push.key")
        #expect(certificate.name == "Apple Push Services: com.example.app")
        try expectUsable(certificate, certificates: 2)
    }

    @Test(arguments: [
        "openssl pkcs8 -topk8 -in push.key -passout pass:secret42",
        "openssl ec -in push.key -aes128 -passout pass:secret42",
    ])
    func `an encrypted key is opened by its password, and by no other`(command: String) throws {
        try workshop.makeCertificate()
        try workshop.run("\(command) -out locked.key")
        try expectUsable(pem("push.pem", key: "locked.key", password: "secret42"))
        #expect(
            try refusal { try pem("push.pem", key: "locked.key") }
                == "the private key is encrypted and no password is given: set it")
        for wrong in ["", "secret43", String(repeating: "x", count: 5000)] {
            #expect(
                try refusal { try pem("push.pem", key: "locked.key", password: wrong) }
                    == "the password of the private key is wrong: correct it")
        }
    }

    @Test func `a key that is encrypted as OpenSSL 3 no longer does is refused with the command that converts it`()
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
                "the private key is encrypted by an algorithm that OpenSSL 3 opens no longer: `openssl pkey"))
        try workshop.run(
            """
            openssl pkey -provider legacy -provider default -in old.pem -aes256 -out new.pem \
            -passin pass:secret42 -passout pass:secret42
            """)
        try expectUsable(pem("push.pem", key: "new.pem", password: "secret42"))
    }

    @Test func `the key of another certificate is refused`() throws {
        try workshop.makeCertificate()
        _ = try workshop.makeKey("other.key")
        #expect(
            try refusal { try pem("push.pem", key: "other.key") }.hasPrefix(
                "the private key is not that of the certificate 'Apple Push Services: com.example.app'"))
    }

    @Test func `what lacks a certificate or a key is refused by what it lacks`() throws {
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
        #expect(try refusal { try pem("push.pem", key: "damaged.key") } == "the private key is damaged: export it anew")
    }

    @Test func `one that has expired or is not yet valid is refused with the date`() throws {
        try workshop.makeCertificate()
        let certificate = try pem("push.pem", key: "push.key")
        let after = certificate.expiresAt.advanced(byMicroseconds: 1)
        let before = certificate.validFrom.advanced(byMicroseconds: -1)
        for edge in [certificate.validFrom, certificate.expiresAt] {
            #expect(throws: Never.self) { try pem("push.pem", key: "push.key", at: edge) }
        }
        let day = Date(timeIntervalSince1970: Double(certificate.expiresAt.microseconds) / 1e6).formatted(.iso8601)
        let expired = "the certificate 'Apple Push Services: com.example.app' expired at \(day): make a new one"
        #expect(try refusal { try pem("push.pem", key: "push.key", at: after) }.hasPrefix(expired))
        #expect(try refusal { try pem("push.pem", key: "push.key", at: before) }.contains("is not valid before 20"))
        #expect(throws: CredentialError.self) { try certificate.requireValidity(at: after) }
    }

    // MARK: PKCS#12

    @Test func `a PKCS#12 file is opened by its password, and by no other`() throws {
        try workshop.makeCertificate(extensions: appleExtensions)
        try workshop.makeCertificate("issuer", subject: "/CN=Issuer")
        try workshop.run(
            """
            openssl pkcs12 -export -in push.pem -inkey push.key -certfile issuer.pem \
            -out push.p12 -passout pass:secret42-Schlüssel
            """)
        let certificate = try pkcs12("push.p12", password: "secret42-Schlüssel")
        #expect(certificate.topics.count == 3)
        try expectUsable(certificate, certificates: 2)
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

    @Test func `a PKCS#12 file without a password is opened without one`() throws {
        try workshop.makeCertificate()
        try workshop.run("openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:")
        try workshop.run(
            "openssl pkcs12 -export -in push.pem -inkey push.key -out bare.p12 -passout pass: -keypbe NONE -certpbe NONE -nomac"
        )
        for name in ["push.p12", "bare.p12"] {
            try expectUsable(pkcs12(name))
            try expectUsable(pkcs12(name, password: ""))
        }
    }

    @Test func `an old PKCS#12 file of triple DES is opened, since OpenSSL 3 can`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            """
            openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:secret42 \
            -keypbe PBE-SHA1-3DES -certpbe PBE-SHA1-3DES -macalg sha1
            """)
        try expectUsable(pkcs12("push.p12", password: "secret42"))
    }

    @Test func `a PKCS#12 file of RC2-40 is refused by that name, and the commands that are given convert it`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            "openssl pkcs12 -export -legacy -in push.pem -inkey push.key -out old.p12 -passout pass:secret42")
        let message = try refusal { try pkcs12("old.p12", password: "secret42") }
        #expect(message.hasPrefix("the PKCS#12 file is encrypted with RC2-40, which OpenSSL 3 opens no longer"))
        let commands = message.split(separator: "`").filter { $0.hasPrefix("openssl ") }
        #expect(
            commands == [
                "openssl pkcs12 -legacy -in old.p12 -nodes -out push.pem",
                "openssl pkcs12 -export -in push.pem -out new.p12",
            ])
        try workshop.run("\(commands[0]) -passin pass:secret42")
        try expectUsable(pem("push.pem"))
        try workshop.run("\(commands[1]) -passout pass:secret42")
        try expectUsable(pkcs12("new.p12", password: "secret42"))
        // A wrong password is found first: the checksum is not of RC2-40.
        #expect(
            try refusal { try pkcs12("old.p12", password: "wrong") }.hasPrefix(
                "the password of the PKCS#12 file is wrong"))
    }

    @Test func `a PKCS#12 file that lacks something is refused by what it lacks`() throws {
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
                "there is a private key and no certificate"))
    }

    @Test func `what is not a PKCS#12 file is refused by what it is`() throws {
        try workshop.makeCertificate()
        try workshop.run("openssl x509 -in push.pem -outform der -out push.cer; printf 'garbage' > garbage; : > empty")
        #expect(try refusal { try pkcs12("push.pem") } == "the file is not a PKCS#12 file, it is PEM: set it as such")
        #expect(try refusal { try pkcs12("push.cer") }.contains("it is a certificate without its private key"))
        #expect(try refusal { try pkcs12("garbage") }.contains("it is of another kind or damaged"))
        #expect(try refusal { try pkcs12("empty") }.contains("it is of another kind or damaged"))
    }

    @Test func `a PKCS#12 file with any byte wrong is refused, or is what it was`() throws {
        try workshop.makeCertificate()
        try workshop.run(
            "openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:secret42 -iter 1 -nomaciter"
        )
        let whole = try workshop.read("push.p12")
        let name = try ClientCertificate(pkcs12: whole, password: "secret42", at: now).name
        for place in whole.indices {
            var bytes = whole
            bytes[place] ^= 0x01
            if let read = try? ClientCertificate(pkcs12: bytes, password: "secret42", at: now) {
                #expect(read.name == name)
            }
            #expect(throws: CredentialError.self) {
                try ClientCertificate(pkcs12: Array(whole.prefix(place)), password: "secret42", at: now)
            }
        }
    }
}
