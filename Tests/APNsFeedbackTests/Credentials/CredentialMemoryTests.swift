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

/// Each in a process of its own: other tests take memory at the same time.
@Suite struct `What OpenSSL has allotted is freed` {
    @Test func `twenty thousand signatures take no memory`() async {
        await #expect(processExitsWith: .success) {
            let key = try SigningKey(p8: Workshop().makeKey())
            try grows(rounds: 20_000) { _ = try key.sign([1, 2, 3]) }
        }
    }

    @Test func `two thousand keys take no memory, and neither do those that are refused`() async {
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

    @Test func `two thousand certificates take no memory, and neither do those that are refused`() async {
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

/// Throws, and so ends the process with a failure, when the rounds leave more than half a megabyte behind: 26 bytes each where
/// there are 20,000. Some rounds before the measurement fill OpenSSL's caches.
private func grows(rounds: Int, _ work: () throws -> Void) throws {
    for _ in 0..<rounds / 4 { try work() }
    let before = try resident()
    for _ in 0..<rounds { try work() }
    let growth = try resident() - before
    if growth > 512 { throw Growth(kilobytes: growth) }
}
