import Foundation
import Synchronization
import Testing
import TokenModel

@testable import APNsFeedback

/// The time of day and the time since the machine started, as two separate clocks.
private final class TwoClocks: Sendable {
    private let state = Mutex((day: Instant(microseconds: 1_795_000_000_250_000), uptime: Duration.seconds(1000)))

    var day: Instant { state.withLock(\.day) }
    var uptime: @Sendable () -> Duration { { self.state.withLock(\.uptime) } }

    func pass(minutes: Int = 0, seconds: Int = 0) {
        state.withLock { $0.uptime += .seconds(minutes * 60 + seconds) }
        set(byMinutes: minutes, seconds: seconds)
    }

    /// Sets the time of day.
    func set(byMinutes minutes: Int = 0, seconds: Int = 0) {
        state.withLock { $0.day = $0.day.advanced(byMicroseconds: Int64(minutes * 60 + seconds) * 1_000_000) }
    }
}

/// A barrier at which eight threads wait for each other, and what they found after it.
private final class EightAtOnce: Sendable {
    let answers = Mutex<[String]>([])
    private let arrived = Atomic(0)

    func wait() {
        arrived.add(1, ordering: .sequentiallyConsistent)
        while arrived.load(ordering: .sequentiallyConsistent) < 8 { sched_yield() }
    }
}

@Suite struct `A provider token` {
    private let workshop: Workshop
    private let key: SigningKey
    private let clocks = TwoClocks()

    init() throws {
        workshop = try Workshop()
        key = try SigningKey(p8: workshop.makeKey())
    }

    private func token(uptime: (@Sendable () -> Duration)? = nil) throws -> ProviderToken {
        try ProviderToken(
            key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ", uptime: uptime ?? clocks.uptime)
    }

    private func part(_ index: Int, of text: String) throws -> Data {
        let parts = text.split(separator: ".", omittingEmptySubsequences: false)
        try #require(parts.count == 3)
        var base64 = parts[index].replacingOccurrences(of: "-", with: "+").replacingOccurrences(of: "_", with: "/")
        #expect(!base64.contains("="))
        base64 += String(repeating: "=", count: (4 - base64.count % 4) % 4)
        return try #require(Data(base64Encoded: base64))
    }

    @Test(arguments: [-120, 120])
    func `a token that was made by a wrong clock is replaced as soon as the clock is right`(minutes: Int) throws {
        clocks.set(byMinutes: minutes)
        let token = try token()
        let wrong = try token.text(at: clocks.day)
        #expect(try !token.renew(at: clocks.day, refused: wrong), "another one would be as wrong")
        clocks.pass(minutes: 1)
        clocks.set(byMinutes: -minutes)
        #expect(try token.renew(at: clocks.day, refused: wrong))
        let right = try token.text(at: clocks.day)
        #expect(right != wrong)
        #expect(try !token.renew(at: clocks.day, refused: right), "APNs accepts a new one after 20 minutes")
    }

    @Test func `it is an ES256 JWT whose iat is a whole number of seconds`() throws {
        let text = try token().text(at: clocks.day)
        #expect(String(decoding: try part(0, of: text), as: UTF8.self) == #"{"alg":"ES256","kid":"ABC123DEFG"}"#)
        #expect(String(decoding: try part(1, of: text), as: UTF8.self) == #"{"iss":"DEF123GHIJ","iat":1795000000}"#)
        #expect(text.utf8.allSatisfy { $0 == 0x2d || $0 == 0x2e || $0 == 0x5f || isalnum(Int32($0)) != 0 })
    }

    @Test func `its signature is over its first two parts`() throws {
        let text = try token().text(at: clocks.day)
        let signed = text.prefix(upTo: try #require(text.lastIndex(of: ".")))
        try workshop.write(signed.utf8, to: "signed")
        try workshop.write(ecdsaDER(Array(part(2, of: text))), to: "signature")
        try workshop.run("openssl pkey -in key.p8 -pubout -out public.pem")
        #expect(
            try workshop.run("openssl dgst -sha256 -verify public.pem -signature signature signed") == "Verified OK\n")
    }

    @Test func `it is reused for fifty minutes and then replaced`() throws {
        let token = try token()
        let first = try token.text(at: clocks.day)
        for _ in 0..<49 {
            clocks.pass(minutes: 1)
            #expect(try token.text(at: clocks.day) == first)
        }
        clocks.pass(seconds: 59)
        #expect(try token.text(at: clocks.day) == first)
        clocks.pass(seconds: 1)
        let second = try token.text(at: clocks.day)
        #expect(second != first)
        #expect(String(decoding: try part(1, of: second), as: UTF8.self).contains(#""iat":1795003000}"#))
        #expect(try token.text(at: clocks.day) == second)
    }

    /// The token as other daemons get it, after APNs has accepted it.
    private func shared(by token: ProviderToken, insteadOf other: SharedProviderToken? = nil) throws
        -> SharedProviderToken
    {
        token.was(accepted: true, try token.text(at: clocks.day))
        return try #require(token.toShare(insteadOf: other, at: clocks.day))
    }

    @Test func `daemons with one key soon send one token, that APNs has accepted`() throws {
        let (one, other) = (try token(), try token())
        let first = try one.text(at: clocks.day)
        #expect(one.awaitsProof && one.toShare(insteadOf: nil, at: clocks.day) == nil)
        one.was(accepted: true, "another")
        #expect(one.awaitsProof)
        let row = try shared(by: one)
        #expect(row.key == .init(teamID: "DEF123GHIJ", keyID: "ABC123DEFG") && !row.sealed.contains(first))
        #expect(one.toShare(insteadOf: row, at: clocks.day) == nil, "they have it")
        // The other one has made its own, and APNs has not accepted that yet.
        clocks.pass(seconds: 1)
        #expect(try other.text(at: clocks.day) != first)
        other.take(row, at: clocks.day)
        #expect(
            try other.text(at: clocks.day) == first && !other.awaitsProof
                && other.toShare(insteadOf: row, at: clocks.day) == nil)
        #expect(other.toShare(insteadOf: nil, at: clocks.day) != nil, "the table has lost it")
        // Its maker makes the next one, does not go back, and hands it over before the other one is due.
        clocks.pass(minutes: 50)
        let second = try one.text(at: clocks.day)
        one.take(row, at: clocks.day)
        #expect(try second != first && one.text(at: clocks.day) == second && other.text(at: clocks.day) == first)
        let next = try shared(by: one, insteadOf: row)
        other.take(next, at: clocks.day)
        #expect(try other.text(at: clocks.day) == second)
        other.take(row, at: clocks.day)
        #expect(try other.text(at: clocks.day) == second, "an older one")
        clocks.pass(minutes: 51)
        #expect(try other.text(at: clocks.day) == second)
        clocks.pass(minutes: 4)
        #expect(try other.text(at: clocks.day) != second, "nobody has made another one")
    }

    @Test func `daemons that have made theirs in one second end with one`() throws {
        let (one, other) = (try token(), try token())
        let mine = try shared(by: one)
        let row = try shared(by: other)
        #expect(
            try one.text(at: clocks.day) != other.text(at: clocks.day)
                && one.toShare(insteadOf: row, at: clocks.day) == nil)
        for daemon in [one, other] { daemon.take(row, at: clocks.day) }
        #expect(try one.text(at: clocks.day) == other.text(at: clocks.day) && mine != row)
    }

    @Test func `a daemon whose accepted token is refused because of another one takes that`() throws {
        let (one, other) = (try token(), try token())
        let row = try shared(by: one)
        clocks.pass(minutes: 2)
        let own = try other.text(at: clocks.day)
        other.was(accepted: true, own)
        other.take(row, at: clocks.day)
        #expect(try other.text(at: clocks.day) == own, "it is newer")
        other.was(accepted: false, own)
        other.take(row, at: clocks.day)
        #expect(try other.text(at: clocks.day) == one.text(at: clocks.day))
    }

    @Test(arguments: [-4, 4]) func `a clock that differs by some minutes does not matter`(minutes: Int) throws {
        let row = try shared(by: token())
        clocks.set(byMinutes: minutes)
        let other = try token()
        _ = try other.text(at: clocks.day)
        other.take(row, at: clocks.day)
        #expect(!other.awaitsProof)
        let taken = try other.text(at: clocks.day)
        clocks.pass(minutes: 45)
        #expect(try other.text(at: clocks.day) == taken)
    }

    @Test func `a token of others is not taken if it is refused, too old, changed, or of another key`() throws {
        let good = try shared(by: token())
        func takes(_ shared: SharedProviderToken, _ token: ProviderToken) throws -> Bool {
            let before = try token.text(at: clocks.day)
            token.take(shared, at: clocks.day)
            return try token.text(at: clocks.day) != before
        }
        #expect(try takes(good, token()))
        var changed = good
        changed.sealed = (good.sealed.hasPrefix("A") ? "B" : "A") + good.sealed.dropFirst()
        #expect(try !takes(changed, token()))
        for text in ["", "AAAA", "no base64", String(repeating: "A", count: 100_000)] {
            changed.sealed = text
            #expect(try !takes(changed, token()))
        }
        let otherKey = try ProviderToken(
            key: SigningKey(p8: workshop.makeKey("other")), keyID: "ABC123DEFG", teamID: "DEF123GHIJ",
            uptime: clocks.uptime)
        #expect(try !takes(good, otherKey) && !takes(shared(by: otherKey), token()))
        let otherName = try ProviderToken(key: key, keyID: "ABC123DEFX", teamID: "DEF123GHIJ", uptime: clocks.uptime)
        #expect(try !takes(good, otherName))
        var renamed = good
        renamed.key = otherName.key
        #expect(try !takes(renamed, otherName), "the name is sealed, too")
        let refusing = try token()
        refusing.take(good, at: clocks.day)
        clocks.pass(minutes: 21)
        #expect(try refusing.renew(at: clocks.day, refused: refusing.text(at: clocks.day)))
        #expect(try !takes(good, refusing))
        clocks.pass(minutes: 29)
        #expect(try !takes(good, token()), "it is due")
    }

    @Test func `it is replaced even if the time of day is set back again and again`() throws {
        let token = try token()
        let first = try token.text(at: clocks.day)
        for _ in 0..<49 {
            clocks.pass(minutes: 1)
            clocks.set(byMinutes: -1)
            #expect(try token.text(at: clocks.day) == first)
        }
        clocks.pass(minutes: 1)
        clocks.set(byMinutes: -1)
        #expect(try token.text(at: clocks.day) != first)
    }

    @Test(arguments: [-1440, -60, 60, 1440])
    func `a jump of the time of day replaces it, but not within twenty minutes`(minutes: Int) throws {
        let token = try token()
        let first = try token.text(at: clocks.day)
        clocks.pass(minutes: 1)
        clocks.set(byMinutes: minutes)
        #expect(try token.text(at: clocks.day) == first)
        clocks.pass(minutes: 18, seconds: 59)
        #expect(try token.text(at: clocks.day) == first)
        clocks.pass(seconds: 1)
        let second = try token.text(at: clocks.day)
        #expect(second != first)
        clocks.pass(minutes: 49)
        #expect(try token.text(at: clocks.day) == second)
    }

    @Test func `setting the time of day back by less than a minute changes nothing`() throws {
        let token = try token()
        let first = try token.text(at: clocks.day)
        clocks.pass(minutes: 20)
        clocks.set(byMinutes: -20, seconds: -54)
        #expect(try token.text(at: clocks.day) == first)
        clocks.set(seconds: -12)
        #expect(try token.text(at: clocks.day) != first)
    }

    @Test func `it accepts any instant`() throws {
        for instants in [[Instant.distantPast, .distantFuture], [.distantFuture, .distantPast]] {
            let token = try token()
            for instant in instants {
                clocks.pass(minutes: 20)
                #expect(try !token.text(at: instant).isEmpty)
            }
        }
    }

    @Test func `a refused token is replaced once it is twenty minutes old`() throws {
        let token = try token()
        let first = try token.text(at: clocks.day)
        clocks.pass(minutes: 19, seconds: 59)
        #expect(try !token.renew(at: clocks.day, refused: first))
        #expect(try token.text(at: clocks.day) == first)
        clocks.pass(seconds: 1)
        #expect(try token.renew(at: clocks.day, refused: first))
        let second = try token.text(at: clocks.day)
        #expect(second != first)
        // The responses to the other requests with this token arrive later.
        #expect(try token.renew(at: clocks.day, refused: first))
        #expect(try token.text(at: clocks.day) == second)
        #expect(try !token.renew(at: clocks.day, refused: second))
    }

    @Test func `a refused token is replaced if none has been made yet`() throws {
        let token = try token()
        #expect(try token.renew(at: clocks.day, refused: "of the last process"))
        #expect(try !token.text(at: clocks.day).isEmpty)
    }

    @Test func `eight threads that ask at once get the same token`() throws {
        for _ in 0..<50 {
            let token = try token(uptime: slow(clocks.uptime))
            let texts = inEightThreads { try token.text(at: self.clocks.day) }
            #expect(texts.count == 8)
            #expect(Set(texts).count == 1)
        }
    }

    @Test func `eight threads whose token is refused at once make one new token`() throws {
        for _ in 0..<50 {
            let token = try token(uptime: slow(clocks.uptime))
            let first = try token.text(at: clocks.day)
            clocks.pass(minutes: 30)
            let texts = inEightThreads {
                guard try token.renew(at: self.clocks.day, refused: first) else { return "not renewed" }
                return try token.text(at: self.clocks.day)
            }
            #expect(texts.count == 8)
            #expect(Set(texts).count == 1)
            #expect(texts.first != first)
            #expect(texts.first != "not renewed")
        }
    }

    /// Yields to the other threads whenever it is read, which a token does in the middle of its work.
    private func slow(_ uptime: @escaping @Sendable () -> Duration) -> @Sendable () -> Duration {
        {
            for _ in 0..<20 { sched_yield() }
            return uptime()
        }
    }

    /// The results of eight threads that start together.
    private func inEightThreads(_ work: @escaping @Sendable () throws -> String) -> [String] {
        let start = EightAtOnce()
        let done = DispatchGroup()
        for _ in 0..<8 {
            done.enter()
            Thread.detachNewThread {
                start.wait()
                if let answer = try? work() { start.answers.withLock { $0.append(answer) } }
                done.leave()
            }
        }
        done.wait()
        return start.answers.withLock(\.self)
    }

    @Test(arguments: [
        ("", "has 0 characters"), ("ABC123DEF", "has 9 characters"), ("ABC123DEFGH", "has 11 characters"),
        ("abc123defg", "some other than A to Z and 0 to 9"), ("ABC123DEF\"", "some other than"),
        ("ÄBC123DEFG", "some other than"),
    ])
    func `a key id or team id that is not ten letters and digits is refused by name`(text: String, what: String)
        throws
    {
        let keyError = try #require(throws: CredentialError.self) {
            try ProviderToken(key: key, keyID: text, teamID: "DEF123GHIJ")
        }
        #expect(keyError.message.hasPrefix("the key id has "))
        #expect(keyError.message.contains(what))
        let teamError = try #require(throws: CredentialError.self) {
            try ProviderToken(key: key, keyID: "ABC123DEFG", teamID: text)
        }
        #expect(teamError.message.hasPrefix("the team id has "))
    }

    @Test func `it can be reused for twenty to fifty-eight minutes`() throws {
        for seconds in [20 * 60, 58 * 60] as [Int64] {
            #expect(throws: Never.self) {
                try ProviderToken(key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ", reusedFor: .seconds(seconds))
            }
        }
        for seconds in [0, -1, 20 * 60 - 1, 58 * 60 + 1, 3600] as [Int64] {
            let error = try #require(throws: CredentialError.self) {
                try ProviderToken(key: key, keyID: "ABC123DEFG", teamID: "DEF123GHIJ", reusedFor: .seconds(seconds))
            }
            #expect(
                error.message.hasPrefix("a provider token would be used for \(seconds) seconds, expected 1200 to 3480"))
        }
    }

    @Test func `its description does not show it`() throws {
        let token = try token()
        let text = try token.text(at: clocks.day)
        #expect(
            "\(token)".contains(
                "a provider token of the key ABC123DEFG of the team DEF123GHIJ"))
        var dumped = ""
        dump(token, to: &dumped)
        #expect(!dumped.contains(text))
    }
}
