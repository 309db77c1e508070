import Foundation
import TestThreads
import Testing

@testable import APNsFeedback

@Suite(.ownThread) struct `The APNs signing key` {
    private let workshop: Workshop

    init() throws { workshop = try Workshop() }

    private func refusal(_ bytes: [UInt8]) throws -> String {
        try #require(throws: CredentialError.self) { try SigningKey(p8: bytes) }.message
    }

    private func refusal(of name: String) throws -> String {
        let bytes = try workshop.read(name)
        let message = try refusal(bytes)
        #expect(!message.contains("\n"))
        for line in String(decoding: bytes, as: UTF8.self).split(separator: "\n") where !line.hasPrefix("-----") {
            #expect(!message.contains(line))
        }
        return message
    }

    @Test func `a thousand signatures verify, including ones with leading zeros`() throws {
        let key = try SigningKey(p8: workshop.makeKey())
        try workshop.run("openssl pkey -in key.p8 -pubout -out public.pem")
        var count = 0
        var hasShortR = false
        var hasShortS = false
        // One signature in 256 has a short r, and one in 256 a short s. If one of the two never occurs in 10,000, the chance is
        // one in 10^17, or signatures are not padded.
        while count < 1000 || (!hasShortR || !hasShortS) && count < 10_000 {
            let message = Array("message \(count)".utf8)
            let signature = try key.sign(message)
            #expect(signature.count == 64)
            hasShortR = hasShortR || signature[0] == 0
            hasShortS = hasShortS || signature[32] == 0
            try workshop.write(message, to: "\(count).message")
            try workshop.write(ecdsaDER(signature), to: "\(count).signature")
            count += 1
        }
        try #require(hasShortR && hasShortS)
        let said = try workshop.run(
            """
            for message in *.message; do
                openssl dgst -sha256 -verify public.pem -signature ${message%.message}.signature $message
            done
            """)
        #expect(said == String(repeating: "Verified OK\n", count: count))
    }

    @Test func `a key is read with any line ends and any surrounding text`() throws {
        let text = String(decoding: try workshop.makeKey(), as: UTF8.self)
        let dos = text.replacingOccurrences(of: "\n", with: "\r\n")
        for variant in [
            text, dos, "\u{feff}" + text, "Bag Attributes: Schlüssel\n\n" + text + "\n\n",
            text.trimmingCharacters(in: .newlines),
        ] {
            #expect(throws: Never.self) { try SigningKey(p8: Array(variant.utf8)) }
        }
    }

    /// Environment variables, web forms, JSON and PowerShell: node-apn#650, pigeon#138, novu#2341, coolify#6384.
    @Test func `a key is read as people pass it on`() throws {
        let text = String(decoding: try workshop.makeKey(), as: UTF8.self)
        try workshop.run("openssl pkcs8 -topk8 -nocrypt -in key.p8 -outform der -out key.der")
        let der = try workshop.read("key.der")
        let body = text.split(separator: "\n").filter { !$0.hasPrefix("-") }.joined()
        let escaped = text.replacingOccurrences(of: "\n", with: "\\n")
        let wide = Array(text.utf16)
        let signed = try SigningKey(p8: Array(text.utf8))
        for (name, variant) in [
            ("a backslash and an n", Array(escaped.utf8)),
            ("two of them", Array(escaped.replacingOccurrences(of: "\\n", with: "\\\\n").utf8)),
            ("blanks", Array(text.replacingOccurrences(of: "\n", with: " ").utf8)),
            ("one line", Array(text.replacingOccurrences(of: "\n", with: "").utf8)),
            ("quoted", Array("\"\(escaped)\"".utf8)),
            ("JSON", Array(#"{"key_id":"x","private_key":"\#(escaped)"}"#.utf8)),
            ("base64", Array(Data(text.utf8).base64EncodedString().utf8)),
            ("base64 in lines", Array(Data(text.utf8).base64EncodedString(options: .lineLength64Characters).utf8)),
            ("no BEGIN", Array(body.utf8)), ("DER", der),
            ("UTF-16, little endian", [0xFF, 0xFE] + wide.flatMap { [UInt8($0 & 0xFF), UInt8($0 >> 8)] }),
            ("UTF-16, big endian", [0xFE, 0xFF] + wide.flatMap { [UInt8($0 >> 8), UInt8($0 & 0xFF)] }),
            ("UTF-16 without a mark", wide.flatMap { [UInt8($0 & 0xFF), UInt8($0 >> 8)] }),
        ] as [(String, [UInt8])] {
            let read = try? SigningKey(p8: variant)
            #expect(read?.isSame(as: signed) == true, "\(name)")
        }
    }

    @Test func `the older format of an EC key is read, too`() throws {
        try workshop.run("openssl ecparam -name prime256v1 -genkey -out old.pem")
        #expect(try workshop.read("old.pem").starts(with: "-----BEGIN EC PARAMETERS-----".utf8))
        #expect(throws: Never.self) { try SigningKey(p8: workshop.read("old.pem")) }
    }

    @Test func `input that is not PEM is refused`() throws {
        #expect(try refusal([]).hasPrefix("no PEM was found, it is empty: use the AuthKey_….p8 file"))
        #expect(try refusal(Array("garbage".utf8)).hasPrefix("no PEM was found, there is no complete"))
        #expect(try refusal([0x30, 0x82, 0xff, 0xfe, 0x00]).hasPrefix("no PEM was found"))
        // Cut off.
        #expect(try refusal(workshop.makeKey().dropLast(10)).hasPrefix("no PEM was found"))
    }

    @Test func `what is no key is named`() throws {
        let pem = String(decoding: try workshop.makeKey(), as: UTF8.self)
        let found: [(String, String)] = [
            ("<!DOCTYPE html><html><body>Sign in</body></html>", "a web page was found"),
            ("PK\u{3}\u{4}abc", "a zip archive was found"),
            (
                pem.replacingOccurrences(of: "\n", with: "%0A").replacingOccurrences(of: " ", with: "%20"),
                "the text is URL-encoded"
            ),
            (
                pem.replacingOccurrences(of: "-----", with: "\u{2014}\u{2014}"),
                "a text program has replaced the hyphens"
            ),
        ]
        for (text, words) in found { #expect(try refusal(Array(text.utf8)).hasPrefix(words), "\(words)") }
        try workshop.write(pem.utf8, to: "key.pem")
        try workshop.run("openssl req -new -x509 -key key.pem -subj /CN=x -days 9 -outform DER -out cert.der")
        #expect(try refusal(workshop.read("cert.der")).hasPrefix("a certificate was found"))
        try workshop.run("openssl x509 -inform DER -in cert.der -out cert.pem")
        try workshop.run("openssl pkcs12 -export -inkey key.pem -in cert.pem -passout pass: -out id.p12")
        #expect(try refusal(workshop.read("id.p12")).hasPrefix("a PKCS#12 file was found"))
        try workshop.run("openssl ec -in key.pem -outform DER -out sec1.der")
        let key = try SigningKey(p8: Array(pem.utf8))
        #expect(try SigningKey(p8: workshop.read("sec1.der")).isSame(as: key))
    }

    @Test func `of two keys in a file, none is taken`() throws {
        let (one, other) = (try workshop.makeKey(), try workshop.makeKey("other"))
        #expect(try refusal(one + other).hasPrefix("2 private keys were found, expected one"))
        #expect(throws: Never.self) { try SigningKey(p8: one + one) }
    }

    @Test func `a damaged key is refused`() throws {
        let text = String(decoding: try workshop.makeKey(), as: UTF8.self)
        let lines = text.split(separator: "\n")
        try workshop.write((lines[0] + "\n" + lines[2] + "\n" + lines.last! + "\n").utf8, to: "damaged.p8")
        #expect(try refusal(of: "damaged.p8").hasPrefix("the private key is truncated or damaged"))
    }

    @Test(arguments: [
        "openssl pkcs8 -topk8 -in key.p8 -passout pass:secret42",
        "openssl ec -in key.p8 -aes128 -passout pass:secret42",
    ])
    func `an encrypted key is refused without a prompt, with the command that decrypts it`(
        command: String
    ) throws {
        _ = try workshop.makeKey()
        try workshop.run("\(command) -out encrypted.p8")
        #expect(
            try refusal(of: "encrypted.p8")
                == "the private key is encrypted, expected one without a password: "
                + "`openssl pkey -in encrypted.p8 -out plain.p8` decrypts it")
        try workshop.run("openssl pkey -in encrypted.p8 -passin pass:secret42 -out plain.p8")
        #expect(throws: Never.self) { try SigningKey(p8: workshop.read("plain.p8")) }
    }

    @Test func `a key of another kind or curve is refused by name`() throws {
        try workshop.run("openssl genpkey -algorithm RSA -out rsa.p8")
        #expect(
            try refusal(of: "rsa.p8").hasPrefix("the private key is RSA, expected EC on the curve P-256"))
        try workshop.run("openssl genpkey -algorithm ED25519 -out ed.p8")
        #expect(try refusal(of: "ed.p8").contains("the private key is ED25519"))
        try workshop.run("openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out p384.p8")
        #expect(try refusal(of: "p384.p8").hasPrefix("the private key is on the curve secp384r1, expected P-256"))
    }

    @Test func `a certificate, a public key and a signing request are refused by name`() throws {
        try workshop.makeCertificate()
        #expect(try refusal(of: "push.pem").hasPrefix("a certificate was found, expected a private key"))
        try workshop.run("openssl pkey -in push.key -pubout -out public.pem")
        #expect(try refusal(of: "public.pem").hasPrefix("a public key was found, expected the private one"))
        try workshop.run("openssl req -new -key push.key -subj /CN=x -out request.pem")
        #expect(try refusal(of: "request.pem").hasPrefix("no private key was found"))
    }

    @Test func `the description of a key shows nothing of it`() throws {
        #expect("\(try SigningKey(p8: workshop.makeKey()))" == "an APNs signing key")
    }
}
