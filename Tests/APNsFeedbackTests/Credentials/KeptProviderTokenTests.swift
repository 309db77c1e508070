import Foundation
import Synchronization
import Testing
import TokenModel

@testable import APNsFeedback

/// Keeps a token in memory.
private final class MemoryStore: ProviderTokenStore {
    private let state = Mutex<String?>(nil)

    init(_ kept: String? = nil) { state.withLock { $0 = kept } }

    var kept: String? {
        get { state.withLock(\.self) }
        set { state.withLock { $0 = newValue } }
    }

    func replace(_ choose: (_ kept: String?) throws(CredentialError) -> String) throws(CredentialError) {
        kept = try choose(kept)
    }
}

@Suite struct `A kept provider token` {
    private let key: SigningKey
    private let workshop: Workshop
    private let store = MemoryStore()
    private static let start = Instant(microseconds: 1_795_000_000_000_000)

    init() throws {
        workshop = try Workshop()
        key = try SigningKey(p8: workshop.makeKey())
    }

    /// As a new process would make it.
    private func process() throws -> ProviderToken {
        try ProviderToken(key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ", store: store, uptime: { .zero })
    }

    private func after(minutes: Int, seconds: Int = 0) -> Instant {
        Self.start.advanced(byMicroseconds: Int64(minutes * 60 + seconds) * 1_000_000)
    }

    @Test func `the next process uses it until it is fifty minutes old`() throws {
        let first = try process().text(at: Self.start)
        #expect(store.kept == first)
        for minutes in [0, 1, 19, 49] { #expect(try process().text(at: after(minutes: minutes)) == first) }
        #expect(try process().text(at: after(minutes: 49, seconds: 59)) == first)
        #expect(store.kept == first)
        let second = try process().text(at: after(minutes: 50))
        #expect(second != first && store.kept == second)
    }

    @Test func `its age goes on in the next process`() throws {
        let first = try process().text(at: Self.start)
        let clock = Atomic(Int64(5))
        let next = try ProviderToken(
            key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ", store: store,
            uptime: { .seconds(clock.load(ordering: .relaxed)) })
        #expect(try next.text(at: after(minutes: 40)) == first)
        // By uptime, it is 50 minutes old 10 minutes later. The time of day is set back meanwhile.
        clock.store(5 + 599, ordering: .relaxed)
        #expect(try next.text(at: after(minutes: 40)) == first)
        clock.store(5 + 600, ordering: .relaxed)
        #expect(try next.text(at: after(minutes: 40)) != first)
    }

    @Test func `it is not used if it was issued in the future`() throws {
        let first = try process().text(at: Self.start)
        #expect(try process().text(at: after(minutes: -1)) == first, "a clock may be set back a little")
        #expect(try process().text(at: after(minutes: -1, seconds: -1)) != first)
        store.kept = first
        #expect(try process().text(at: .distantPast) != first)
        store.kept = first
        #expect(try process().text(at: .distantFuture) != first)
    }

    @Test func `it is not used if another key, key id or team made it`() throws {
        let first = try process().text(at: Self.start)
        let others = [
            try ProviderToken(
                key: SigningKey(p8: workshop.makeKey("other.p8")), keyID: "ABC123DEFG", teamID: "DEF123GHIJ",
                store: store),
            try ProviderToken(key: key, keyID: "ABC123DEFH", teamID: "DEF123GHIJ", store: store),
            try ProviderToken(key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIK", store: store),
        ]
        for other in others {
            store.kept = first
            let text = try other.text(at: Self.start)
            #expect(text != first && store.kept == text)
        }
        // The signature of another token of this key does not fit either.
        let later = try process().text(at: after(minutes: 60)).split(separator: ".")
        let mixed = (first.split(separator: ".").prefix(2) + later.suffix(1)).joined(separator: ".")
        store.kept = mixed
        #expect(try process().text(at: Self.start) != mixed)
    }

    @Test func `damage of any byte is noticed`() throws {
        let jwt = ProviderJWT(key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ")
        let text = try jwt.text(issuedAt: 1_795_000_000)
        #expect(jwt.issuedAt(of: text) == 1_795_000_000)
        let bytes = Array(text.utf8)
        for index in bytes.indices {
            for byte in [bytes[index] ^ 1, UInt8(ascii: "."), UInt8(ascii: "A"), 0, 0x0a] where byte != bytes[index] {
                var damaged = bytes
                damaged[index] = byte
                #expect(jwt.issuedAt(of: String(decoding: damaged, as: UTF8.self)) == nil, "byte \(index): \(byte)")
            }
            #expect(jwt.issuedAt(of: String(decoding: bytes.prefix(index), as: UTF8.self)) == nil)
        }
        for ending in ["\n", "=", ".", "\0", "A", "\r\nx: y"] { #expect(jwt.issuedAt(of: text + ending) == nil) }
        #expect(ErrorQueue.isEmpty)
    }

    @Test func `only the spelling of iat that we write is accepted, even with a valid signature`() throws {
        let jwt = ProviderJWT(key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ")
        func signed(_ claims: String, header: String = #"{"alg":"ES256","kid":"ABC123DEFG"}"#) throws -> String {
            func base64(_ bytes: some Sequence<UInt8>) -> String {
                Data(bytes).base64EncodedString().replacing("+", with: "-").replacing("/", with: "_")
                    .replacing("=", with: "")
            }
            let text = "\(base64(header.utf8)).\(base64(claims.utf8))"
            return "\(text).\(base64(try key.sign(Array(text.utf8))))"
        }
        #expect(jwt.issuedAt(of: try signed(#"{"iss":"DEF123GHIJ","iat":1795000000}"#)) == 1_795_000_000)
        for number in ["+1795000000", "01795000000", "1795000000.0", "\"1795000000\"", "1795000000 ", "", "1e9"] {
            #expect(jwt.issuedAt(of: try signed(#"{"iss":"DEF123GHIJ","iat":\#(number)}"#)) == nil, "\(number)")
        }
        let claims = #"{"iss":"DEF123GHIJ","iat":1795000000}"#
        #expect(jwt.issuedAt(of: try signed(claims, header: #"{"kid":"ABC123DEFG","alg":"ES256"}"#)) == nil)
        #expect(jwt.issuedAt(of: try signed(claims, header: #"{"alg":"none","kid":"ABC123DEFG"}"#)) == nil)
        let huge = try signed(#"{"iss":"DEF123GHIJ","iat":9223372036854775807}"#)
        store.kept = huge
        #expect(try process().text(at: Self.start) != huge)
    }

    @Test func `a refused token is replaced in the store, and not taken from it again`() throws {
        let first = try process().text(at: Self.start)
        let next = try process()
        #expect(try next.text(at: after(minutes: 30)) == first)
        #expect(try next.renew(at: after(minutes: 30), refused: first))
        let second = try next.text(at: after(minutes: 30))
        #expect(second != first && store.kept == second)
        #expect(try process().text(at: after(minutes: 31)) == second)
        // A process that has none yet, and is told that the kept one was refused.
        #expect(try process().renew(at: after(minutes: 31), refused: second))
        #expect(store.kept != second)
    }

    @Test func `two processes share the token that one of them has renewed`() throws {
        let clock = Atomic(Int64(0))
        func process() throws -> ProviderToken {
            try ProviderToken(
                key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ", store: store,
                uptime: { .seconds(clock.load(ordering: .relaxed)) })
        }
        let (one, other) = (try process(), try process())
        let first = try one.text(at: Self.start)
        #expect(try other.text(at: Self.start) == first)
        clock.store(50 * 60, ordering: .relaxed)
        let second = try other.text(at: after(minutes: 50))
        #expect(second != first)
        #expect(try one.text(at: after(minutes: 50)) == second)
        // One learns that it was refused, and the other has replaced it already.
        clock.store(80 * 60, ordering: .relaxed)
        #expect(try other.renew(at: after(minutes: 80), refused: second))
        let third = try other.text(at: after(minutes: 80))
        #expect(try one.renew(at: after(minutes: 80), refused: second))
        #expect(try one.text(at: after(minutes: 80)) == third && third != second)
    }
}
