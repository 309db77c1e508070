import Testing

@testable import APNsFeedback

@Suite struct `OpenSSL's error queue` {
    private let workshop: Workshop

    init() throws { workshop = try Workshop() }

    /// Leaves an error in the queue, as a careless user of OpenSSL does.
    private func leaveError() {
        #expect(Certificate(der: [0x30]) == nil)
        #expect(!ErrorQueue.isEmpty)
    }

    @Test func `refused input leaves nothing in it`() throws {
        try workshop.makeCertificate()
        _ = try workshop.makeKey("other.key")
        try workshop.run(
            """
            openssl pkcs12 -export -in push.pem -inkey push.key -out push.p12 -passout pass:x
            openssl pkcs12 -export -legacy -in push.pem -inkey push.key -out old.p12 -passout pass:x
            openssl pkcs8 -topk8 -in push.key -passout pass:x -out locked.key
            sed 2d push.key > damaged.key
            """)
        for name in ["damaged.key", "locked.key"] {
            let key = try workshop.read(name)
            #expect(throws: CredentialError.self) { try SigningKey(p8: key) }
            #expect(ErrorQueue.isEmpty)
        }
        let certificate = try workshop.read("push.pem")
        for name in ["damaged.key", "locked.key", "other.key"] {
            let key = try workshop.read(name)
            #expect(throws: CredentialError.self) {
                try ClientCertificate(pem: certificate, key: key, password: "y", at: anHourFromNow)
            }
            #expect(ErrorQueue.isEmpty)
        }
        for (name, password) in [("push.p12", "y"), ("old.p12", "x"), ("push.pem", "x")] {
            let file = try workshop.read(name)
            #expect(throws: CredentialError.self) {
                try ClientCertificate(pkcs12: file, password: password, at: anHourFromNow)
            }
            #expect(ErrorQueue.isEmpty)
        }
    }

    @Test func `earlier errors in it change nothing, and are cleared`() throws {
        try workshop.makeCertificate()
        try workshop.run("cat push.pem push.key > one.pem")
        let (key, pem) = (try workshop.read("push.key"), try workshop.read("one.pem"))
        leaveError()
        let signingKey = try SigningKey(p8: key)
        #expect(ErrorQueue.isEmpty)
        leaveError()
        #expect(try signingKey.sign([1]).count == 64)
        #expect(ErrorQueue.isEmpty)
        leaveError()
        _ = try ClientCertificate(pem: pem, at: anHourFromNow)
        #expect(ErrorQueue.isEmpty)
    }
}
