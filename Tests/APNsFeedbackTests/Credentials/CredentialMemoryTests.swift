import Foundation
import Testing
import TokenModel

@testable import APNsFeedback

/// The memory of this process, in kilobytes.
private func resident() throws -> Int {
    let status = try String(contentsOfFile: "/proc/self/status", encoding: .utf8)
    let line = try #require(status.split(separator: "\n").first { $0.hasPrefix("VmRSS:") })
    return try #require(line.split(whereSeparator: \.isWhitespace).dropFirst().first.flatMap { Int($0) })
}

/// Each test runs in its own process, because other tests use memory at the same time.
@Suite struct `OpenSSL's memory is freed` {
    @Test func `twenty thousand signatures leak no memory`() async {
        await #expect(processExitsWith: .success) {
            let key = try SigningKey(p8: Workshop().makeKey())
            try grows(rounds: 20_000) { _ = try key.sign([1, 2, 3]) }
        }
    }

    @Test func `twenty thousand accepted and refused signatures leak no memory`() async {
        await #expect(processExitsWith: .success) {
            let key = try SigningKey(p8: Workshop().makeKey())
            let signature = try key.sign([1, 2, 3])
            try grows(rounds: 10_000) {
                #expect(key.hasSigned([1, 2, 3], signature))
                #expect(!key.hasSigned([1, 2, 4], signature))
            }
        }
    }

    @Test func `two thousand accepted and refused keys leak no memory`() async {
        await #expect(processExitsWith: .success) {
            let workshop = try Workshop()
            let right = try workshop.makeKey()
            try workshop.run("openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out wrong.p8")
            let wrong = try workshop.read("wrong.p8")
            try grows(rounds: 2_000) {
                _ = try SigningKey(p8: right)
                _ = try? SigningKey(p8: wrong)
            }
        }
    }

    @Test func `two thousand accepted and refused certificates leak no memory`() async {
        await #expect(processExitsWith: .success) {
            let workshop = try Workshop()
            try workshop.makeCertificate(extensions: "1.2.840.113635.100.6.3.6 = DER:30050c03612e62")
            try workshop.run(
                """
                cat push.pem push.key > one.pem
                openssl pkcs12 -export -in push.pem -inkey push.key -certfile push.pem -out push.p12 -passout pass:x \
                -iter 1 -nomaciter
                openssl pkcs12 -export -legacy -in push.pem -inkey push.key -out old.p12 -passout pass:x \
                -iter 1 -nomaciter
                """)
            let (pem, pkcs12, old) = (
                try workshop.read("one.pem"), try workshop.read("push.p12"), try workshop.read("old.p12")
            )
            try grows(rounds: 2_000) {
                _ = try ClientCertificate(pem: pem, at: anHourFromNow)
                _ = try ClientCertificate(pkcs12: pkcs12, password: "x", at: anHourFromNow)
                _ = try? ClientCertificate(pkcs12: old, password: "x", at: anHourFromNow)
                _ = try? ClientCertificate(pkcs12: pkcs12, password: "y", at: anHourFromNow)
                _ = try? ClientCertificate(pem: pem, at: .distantFuture)
            }
        }
    }
}

private struct Growth: Error {
    var kilobytes: Int
}

/// Throws, and so ends the process with a failure, if the rounds leak more than half a megabyte: 26 bytes per round for 20,000
/// rounds. Some rounds before the measurement fill OpenSSL's caches.
private func grows(rounds: Int, _ work: () throws -> Void) throws {
    for _ in 0..<rounds / 4 { try work() }
    // A leak grows each time; the kernel may give the process some pages once.
    var growth = 0
    for _ in 1...3 {
        let before = try resident()
        for _ in 0..<rounds { try work() }
        growth = try resident() - before
        if growth <= 512 { return }
    }
    throw Growth(kilobytes: growth)
}

/// How often a text occurs in the writable memory of this process, apart from the argument itself.
private func occurrences(of needle: UnsafeRawBufferPointer) throws -> Int {
    var found = 0
    for line in try String(contentsOfFile: "/proc/self/maps", encoding: .utf8).split(separator: "\n") {
        let fields = line.split(separator: " ", omittingEmptySubsequences: true)
        guard fields.count >= 2, fields[1].hasPrefix("rw"), fields.count < 6 || fields[5].hasPrefix("[") else {
            continue
        }
        let bounds = fields[0].split(separator: "-").compactMap { UInt(radix16: $0) }
        guard bounds.count == 2, let end = UnsafeRawPointer(bitPattern: bounds[1]),
            var place = UnsafeRawPointer(bitPattern: bounds[0])
        else { continue }
        while place.distance(to: end) >= needle.count,
            let hit = memchr(place, CInt(needle[0]), place.distance(to: end) - needle.count + 1)
        {
            if UnsafeRawPointer(hit) != needle.baseAddress, memcmp(hit, needle.baseAddress!, needle.count) == 0 {
                found += 1
            }
            place = UnsafeRawPointer(hit) + 1
        }
    }
    return found
}

private struct MemoryFailure: Error {
    let what: String

    init(_ what: String) { self.what = what }
}

extension UInt {
    fileprivate init?(radix16 text: Substring) { self.init(text, radix: 16) }
}

/// A line of a PEM file, assembled so that no other copy of it exists.
private func needle(line: Int, of file: String, in workshop: Workshop) throws -> UnsafeRawBufferPointer {
    // Encoded until it is in the place where the search ignores it.
    let turned = try workshop.run("sed -n \(line)p \(file) | tr A-Za-z N-ZA-Mn-za-m").utf8.filter { $0 != 0x0A }
    let needle = UnsafeMutableRawBufferPointer.allocate(byteCount: turned.count, alignment: 1)
    for (place, byte) in turned.enumerated() {
        let isLetter = (65...90).contains(byte & 0xDF)
        needle[place] = isLetter ? (byte & 0x20) | ((byte & 0xDF) - 65 + 13) % 26 + 65 : byte
    }
    return UnsafeRawBufferPointer(needle)
}

@Suite struct `The secret of a key file` {
    /// Runs in its own process, in which nothing else has read the key.
    @Test func `is not in memory after the key is made`() async {
        await #expect(processExitsWith: .success) {
            let workshop = try Workshop()
            try workshop.run("openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.p8")
            let needle = try needle(line: 2, of: "key.p8", in: workshop)
            let path = workshop.folder.appending(path: "key.p8").path
            var file: SecretBytes? = try SecretBytes(contentsOf: path)
            let whileRead = try occurrences(of: needle)
            let key = try SigningKey(p8: #require(file))
            file = nil
            _ = try key.sign([1])
            let afterwards = try occurrences(of: needle)
            guard whileRead > 0, afterwards == 0 else {
                throw MemoryFailure("found \(whileRead) times, and afterwards \(afterwards)")
            }
        }
    }

    /// libcurl reads the key from the certificate's own memory, so there is only one copy, which is wiped.
    @Test func `is in memory once while connections use the certificate, and not afterwards`() async {
        await #expect(processExitsWith: .success) {
            let workshop = try Workshop()
            try workshop.makeCertificate()
            try workshop.run("openssl pkcs8 -topk8 -nocrypt -in push.key -out out.key")
            let needle = try needle(line: 2, of: "out.key", in: workshop)
            func file(_ name: String) throws -> SecretBytes {
                try SecretBytes(contentsOf: workshop.folder.appending(path: name).path)
            }
            var certificate: ClientCertificate? = try ClientCertificate(
                pem: file("push.pem"), key: file("push.key"), at: nil)
            func connection(_ number: Int) throws -> TLSConnection {
                let identity = PushIdentity(
                    certificateChainPEM: certificate?.chainPEM, keyPEM: certificate?.keyPEM)
                return try #require(
                    try? TLSConnection(
                        number, to: PushServer(host: "h.example"), identity: identity, options: PushClientOptions(),
                        trace: nil))
            }
            var connections = try (1...3).map(connection)
            certificate = nil
            let whileHeld = try occurrences(of: needle)
            connections = []
            let afterwards = try occurrences(of: needle)
            guard connections.isEmpty, certificate == nil, whileHeld == 1, afterwards == 0 else {
                throw MemoryFailure("found \(whileHeld) times, and afterwards \(afterwards)")
            }
        }
    }
}
