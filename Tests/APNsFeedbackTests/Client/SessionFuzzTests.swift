import LedgerTestSupport
import TestRun
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

/// A server that sends whatever it likes.
@Suite(.ownThread) struct `The HTTP/2 session against nonsense` {
    private static let gone = #"{"reason":"Unregistered","timestamp":1508249865488}"#

    /// A frame that a server could send, or nearly, mostly on one of the streams that are open. Notes which streams it ends.
    private func frame(_ chance: inout SeededChance, _ open: [Int32], ended: inout Set<Int32>) -> [UInt8] {
        let stream = chance.dice(200) == 0 ? Int32(chance.dice(100)) : open.randomElement(using: &chance) ?? 1
        let doesEnd = chance.dice(3) == 0
        func noted(_ bytes: [UInt8], _ doesEnd: Bool, _ ended: inout Set<Int32>) -> [UInt8] {
            if doesEnd { ended.insert(stream) }
            return bytes
        }
        switch chance.dice(16) {
        case 0...3:
            let status = ["410", "410", "200", "103", "400", "999", "x", ""][chance.dice(8)]
            return noted(Frames.head(stream, status, [("apns-id", "a")], ends: doesEnd), doesEnd, &ended)
        case 4...6: return noted(Frames.data(stream, Self.gone, ends: doesEnd), doesEnd, &ended)
        case 7: return Frames.reset(stream, code: UInt32(chance.dice(16)))
        case 8: return Frames.windowUpdate(chance.dice(2) == 0 ? 0 : stream, by: UInt32(chance.dice(1 << 20)))
        case 9:
            return Frames.settings([
                (Frames.Setting(rawValue: UInt8(1 + chance.dice(6)))!, UInt32(chance.dice(1 << 16)))
            ])
        case 10: return Frames.frame(.ping, UInt8(chance.dice(2)), on: 0, [UInt8](repeating: 7, count: 8))
        case 11 where chance.dice(20) == 0: return Frames.goAway(last: stream, code: UInt32(chance.dice(14)), "why")
        case 12:
            return Frames.frame(
                .pushPromise, Frames.endHeaders, on: stream, Frames.word(2) + Frames.block([(":method", "GET")]))
        case 13: return noted(Frames.trailers(stream, [("x", "y")]), true, &ended)
        case 14:
            let payload = (0..<chance.dice(40)).map { _ in UInt8(chance.dice(256)) }
            let (type, flags) = (UInt8(chance.dice(12)), UInt8(chance.dice(256)))
            let mayEnd = type <= 1 && flags & Frames.endStream != 0
            return noted(Frames.frame(type: type, flags, on: stream, payload), mayEnd, &ended)
        default: return Frames.frame(type: UInt8(10 + chance.dice(200)), 0, on: stream, [1, 2, 3])
        }
    }

    @Test func `with random frames every request ends once, and none is answered without END_STREAM`() throws {
        var chance = SeededChance(seed: 20_261_122)
        var frames = 0
        var stale = 0
        while frames < Soak.size(40_000, whole: 1_000_000) {
            try frames += client(&chance, &stale)
        }
        #expect(stale > 100, "it would find nothing otherwise")
    }

    /// One client with a server that sends a few hundred random frames, of which a few have a wrong byte.
    ///
    /// - Returns: The number of frames.
    private func client(_ chance: inout SeededChance, _ stale: inout Int) throws -> Int {
        var client = ClientOverMemory(
            .init(inFlight: 8, connections: 2, answerTimeout: .seconds(30), idleTimeout: .seconds(3600)))
        let all = (1...40).map { request($0) }
        try client.submit(all)
        /// The streams that a frame with END_STREAM has ended, by connection. Of a wrong byte, the test knows no more than the
        /// client what it ends.
        var (ended, isSpoiled): ([Int: Set<Int32>], Set<Int>) = ([:], [])
        var (frames, seen, greeted) = (0, 0, Set<Int>())
        while frames < 400, client.outcomes.count < all.count,
            let number = client.sessions.keys.randomElement(using: &chance)
        {
            frames += 1
            let open = client.requests[number].map { Array($0.keys.sorted().suffix(8)) } ?? []
            var bytes = frame(&chance, open, ended: &ended[number, default: []])
            if greeted.insert(number).inserted { bytes = Frames.settings([(.mostStreams, 100)]) + bytes }
            if chance.dice(100) == 0 {
                bytes[chance.dice(bytes.count)] = UInt8(chance.dice(256))
                isSpoiled.insert(number)
            }
            try client.receive(bytes, on: number)
            if chance.dice(200) == 0 { client.lose(number) }
            if chance.dice(20) == 0 { try client.pass(.milliseconds(chance.dice(2000))) }
            for outcome in client.outcomes[seen...] {
                guard case .answered(let answer) = outcome.end else { continue }
                if answer.status == 410 { stale += 1 }
                #expect(1...2 ~= outcome.sends && outcome.sentAt != nil && answer.status >= 200)
                if answer.status == 200 || isSpoiled.contains(number) { continue }
                let stream = client.requests[number]?.filter { $0.value.id == outcome.request.id }.keys.max()
                #expect(stream.map { ended[number]?.contains($0) == true } == true, "an answer without its end")
            }
            seen = client.outcomes.count
        }
        client.endAll()
        #expect(client.outcomes.map(\.request.id).sorted() == all.map(\.id).sorted(), "each ends once")
        return frames
    }

    @Test func `random bytes cause no crash and no answer`() throws {
        var chance = SeededChance(seed: 7)
        for _ in 1...Soak.size(2_000, whole: 100_000) {
            var session = try SessionOverMemory(settings: chance.dice(2) == 0 ? nil : [])
            #expect(session.open() == 1)
            var bytes = chance.dice(2) == 0 ? Frames.answer(1, "410", Self.gone) : []
            bytes += (0..<chance.dice(300)).map { _ in UInt8(chance.dice(256)) }
            var start = 0
            while start < bytes.count {
                let end = min(bytes.count, start + 1 + chance.dice(20))
                do { try session.receive(Array(bytes[start..<end])) } catch { break }
                start = end
            }
            _ = try? session.send()
            #expect(session.takeEvents().count { if case .answer = $0 { true } else { false } } <= 1)
        }
    }
}
