import CNgHTTP2
import Testing
import TokenModel

@testable import APNsFeedback

/// The session by itself: each test writes the server's frames and reads the client's.
@Suite struct `The HTTP/2 session` {
    private let gone = #"{"reason":"Unregistered","timestamp":1508249865488}"#

    /// A session with so many requests that were sent.
    private func session(_ requests: Int = 1, settings: [(Frames.Setting, UInt32)]? = []) throws -> SessionOverMemory {
        var session = try SessionOverMemory(settings: settings)
        for number in 1...requests { #expect(session.open(request(number)) == Int32(2 * number - 1)) }
        _ = try session.send()
        return session
    }

    @Test func `a response is whole when its stream ends, with its identifiers and its body`() throws {
        var session = try session()
        try session.receive(Frames.head(1, "410", [("apns-id", "a"), ("apns-unique-id", "u"), ("date", "x")]))
        #expect(session.takeEvents() == [.head(1, PushResponse(status: 410, apnsID: "a", uniqueID: "u"))])
        try session.receive(Frames.data(1, String(gone.prefix(9)), ends: false))
        #expect(session.takeEvents() == [])
        try session.receive(Frames.data(1, String(gone.dropFirst(9))))
        #expect(
            session.takeEvents() == [
                .answer(1, PushResponse(status: 410, body: gone, apnsID: "a", uniqueID: "u")), .closed(1, code: 0),
            ])
    }

    @Test func `a response without a body is whole with its head`() throws {
        var session = try session()
        try session.receive(Frames.answer(1, "200"))
        #expect(
            session.takeEvents() == [
                .answer(1, PushResponse(status: 200, apnsID: "00000000-0000-4000-8000-000000000000")),
                .closed(1, code: 0),
            ])
    }

    @Test func `HEADERS of a 200 are reported even if RST_STREAM follows at once`() throws {
        var session = try session()
        try session.receive(Frames.head(1, "200") + Frames.reset(1, code: 2))
        #expect(session.takeEvents() == [.head(1, PushResponse(status: 200)), .closed(1, code: 2)])
    }

    @Test func `interim responses and trailers are ignored, and so are their fields`() throws {
        var session = try session()
        try session.receive(Frames.head(1, "103", [("apns-id", "early")]))
        #expect(session.takeEvents() == [])
        try session.receive(Frames.head(1, "400") + Frames.data(1, "{}", ends: false))
        try session.receive(Frames.trailers(1, [("apns-id", "late")]))
        #expect(
            session.takeEvents() == [
                .head(1, PushResponse(status: 400)), .answer(1, PushResponse(status: 400, body: "{}")),
                .closed(1, code: 0),
            ])
    }

    @Test func `a response with a body shorter than its content-length is incomplete`() throws {
        var session = try session()
        try session.receive(Frames.head(1, "410", [("content-length", "900")]) + Frames.data(1, gone))
        _ = try session.send()
        #expect(
            session.takeEvents() == [
                .head(1, PushResponse(status: 410)), .closed(1, code: 1),
            ])
    }

    @Test func `an endless body is reset after 1 MiB and is not a response`() throws {
        var session = try session()
        try session.receive(Frames.head(1, "410") + Frames.data(1, gone, ends: false))
        let piece = String(repeating: " ", count: 16384)
        var frames: [FrameReader.Frame] = []
        for _ in 1...63 {
            try session.receive(Frames.data(1, piece, ends: false))
            frames += try session.send().frames
        }
        var other = try self.session()
        try other.receive(Frames.head(1, "410"))
        for number in 1...66 {
            if number <= 63 { _ = try other.send() }
            try other.receive(Frames.data(1, piece, ends: number == 66))
        }
        #expect(!other.takeEvents().contains { if case .answer = $0 { true } else { false } }, "the end comes too late")
        for _ in 1...2 {
            try session.receive(Frames.data(1, piece, ends: false))
            frames += try session.send().frames
        }
        #expect(frames.contains { $0.kind == .reset && $0.stream == 1 && $0.word == 8 })
        #expect(frames.contains { $0.kind == .windowUpdate && $0.stream == 1 }, "until then the window is kept open")
        #expect(session.takeEvents() == [.head(1, PushResponse(status: 410)), .closed(1, code: 8)])
    }

    @Test func `a body that goes on after its stream was reset ends the session`() throws {
        var session = try session(2)
        let piece = String(repeating: " ", count: 16384)
        try session.receive(Frames.head(1, "410"))
        #expect(throws: HTTP2Session.Failure(message: "the server sends on streams that have ended")) {
            for _ in 1...2000 {
                try session.receive(Frames.data(1, piece, ends: false))
                _ = try session.send()
            }
        }
        #expect(session.takeEvents() == [.head(1, PushResponse(status: 410)), .closed(1, code: 8)])
    }

    @Test func `a reset that cannot leave keeps no request waiting`() throws {
        var session = try session()
        try session.receive(Frames.head(1, "410"))
        let piece = String(repeating: " ", count: 16384)
        for _ in 1...64 {
            try session.receive(Frames.data(1, piece, ends: false))
            _ = try session.send()
        }
        #expect(session.takeEvents() == [.head(1, PushResponse(status: 410))])
        try session.receive(Frames.data(1, " ", ends: false))
        #expect(session.takeEvents() == [.closed(1, code: 8)], "before anything was written")
    }

    @Test func `many whole responses are no stray bytes`() throws {
        var session = try SessionOverMemory(settings: [(.mostStreams, 1000)])
        let body = String(repeating: " ", count: 16384)
        for number in 0..<1200 {
            let stream = Int32(2 * number + 1)
            #expect(session.open(request(number)) == stream)
            _ = try session.send()
            try session.receive(Frames.answer(stream, "400", body))
            _ = try session.send()
            session.session.beginPeriod()
        }
    }

    @Test func `a request ends with the frame that has END_STREAM, and not before`() throws {
        var session = try SessionOverMemory(settings: [(.initialWindow, 3)])
        var long = request()
        long.payload = Array("12345678".utf8)
        #expect(session.open(long) == 1)
        #expect(session.open(request(2)) == 3)
        let first = try session.send()
        #expect(first.ends == [3], "its two bytes fit into the window")
        #expect(first.frames.filter { $0.kind == .data && $0.stream == 1 }.flatMap(\.payload) == Array("123".utf8))
        for _ in 1...4 {
            try session.receive(Frames.windowUpdate(1, by: 1))
            let more = try session.send()
            #expect(more.ends == [] && more.frames.map(\.payload.count) == [1])
        }
        try session.receive(Frames.windowUpdate(1, by: 100))
        let last = try session.send()
        #expect(last.ends == [1] && last.frames.last?.endsStream == true)
    }

    @Test func `with a window of zero only the headers are sent, until SETTINGS open it`() throws {
        var session = try SessionOverMemory(settings: [(.initialWindow, 0)])
        #expect(session.open() == 1)
        #expect(try session.send().frames.map(\.kind).suffix(1) == [.headers])
        #expect(try session.send().frames.isEmpty)
        try session.receive(Frames.settings([(.initialWindow, 10)]))
        #expect(try session.send().ends == [1])
    }

    @Test func `the limit of streams follows SETTINGS`() throws {
        var session = try SessionOverMemory(settings: nil)
        try session.receive(Frames.settings([(.mostStreams, 1)]))
        try session.receive(Frames.settings([(.mostStreams, 1000)]))
        #expect(session.takeEvents() == [.settings(mostStreams: 1), .settings(mostStreams: 1000)])
    }

    @Test func `GOAWAY refuses the streams above its last one, and its reason is read`() throws {
        var session = try session(3)
        try session.receive(Frames.goAway(last: 3, code: 11, #"{"reason":"BadCertificate"}"# + "\u{7}"))
        let goAway = PushGoAway(code: 11, text: #"{"reason":"BadCertificate"}?"#)
        #expect(session.takeEvents() == [.goAway(last: 3, goAway), .closed(5, code: 7)])
        #expect(PushGoAway(code: 0, text: #"{"reason":"Shutdown"}"#).reason == "Shutdown")
        try session.receive(Frames.answer(1, "200") + Frames.answer(3, "200"))
        #expect(session.takeEvents().count == 4, "the others are still answered")
    }

    @Test func `GOAWAY with the greatest id refuses nothing`() throws {
        var session = try session(2)
        try session.receive(Frames.goAway(last: .max))
        #expect(session.takeEvents() == [.goAway(last: .max, PushGoAway(code: 0))])
        try session.receive(Frames.goAway(last: 1))
        #expect(session.takeEvents() == [.goAway(last: 1, PushGoAway(code: 0)), .closed(3, code: 7)])
    }

    @Test func `a GOAWAY that raises the last stream ends the session`() throws {
        var session = try session(2)
        try session.receive(Frames.goAway(last: 1) + Frames.goAway(last: 3))
        _ = try session.send()
        #expect(session.session.isOver)
    }

    @Test func `a PUSH_PROMISE is a connection error once the server has acknowledged that push is disabled`() throws {
        var session = try session()
        try session.receive(Frames.settingsAcknowledged)
        try session.receive(
            Frames.frame(.pushPromise, Frames.endHeaders, on: 1, Frames.word(2) + Frames.block([(":method", "GET")])))
        #expect(try session.send().frames.contains { $0.kind == .goAway })
        #expect(session.session.isOver)
    }

    @Test func `unknown frames, PRIORITY and PING are accepted`() throws {
        var session = try session()
        try session.receive(Frames.frame(type: 0xee, 0xff, on: 1, [1, 2, 3]))
        try session.receive(Frames.frame(.priority, 0, on: 1, [0, 0, 0, 0, 1]))
        try session.receive(Frames.frame(.ping, 0, on: 0, [1, 2, 3, 4, 5, 6, 7, 8]))
        let frames = try session.send().frames
        #expect(frames.contains { $0.kind == .ping && $0.isAcknowledgement && $0.payload == [1, 2, 3, 4, 5, 6, 7, 8] })
        try session.receive(Frames.answer(1, "200"))
        #expect(session.takeEvents().count == 2)
    }

    @Test func `headers of more than 64 KiB reset their stream`() throws {
        var session = try session()
        // An entry of the table, and many references to it.
        let entry: [UInt8] =
            [0x40, 1, 0x78, 127, 0x81, 0x16] + [UInt8](repeating: 0x79, count: 2944)
            + [UInt8](repeating: 0xbe, count: 30)
        try session.receive(
            Frames.frame(.headers, Frames.endHeaders, on: 1, Frames.block([(":status", "200")]) + entry))
        #expect(try session.send().frames.contains { $0.kind == .reset && $0.stream == 1 })
        #expect(!session.takeEvents().contains { if case .head = $0 { true } else { false } })
    }

    @Test func `a flood of CONTINUATION, or of frames without a response, ends the session`() throws {
        var one = try session()
        let flood = HTTP2Session.Failure(message: "the server floods the connection with frames")
        #expect(throws: flood) {
            try one.receive(Frames.frame(.headers, 0, on: 1, Frames.block([(":status", "200")])))
            for _ in 1...HTTP2Session.mostContinuations + 1 { try one.receive(Frames.frame(.continuation, 0, on: 1)) }
        }
        var other = try session()
        let empty = Frames.data(1, "", ends: false)
        try other.receive(Frames.head(1, "400"))
        for _ in 1...HTTP2Session.mostIdleFrames { try other.receive(empty) }
        #expect(throws: flood) {
            try other.receive(empty)
        }
        var patient = try session()
        try patient.receive(Frames.head(1, "400"))
        for _ in 1...HTTP2Session.mostIdleFrames { try patient.receive(empty) }
        patient.session.beginPeriod()
        try patient.receive(empty)
    }

    // HPACK ------------------------------------------------------------------------------------------------------------

    /// What a server's decoder makes of the requests: the fields, and what is in its table afterwards.
    private func decoded(_ requests: [PushRequest]) throws -> (fields: [[String]], table: [String]) {
        var session = try SessionOverMemory()
        var inflater: OpaquePointer?
        #expect(nghttp2_hd_inflate_new(&inflater) == 0)
        defer { nghttp2_hd_inflate_del(inflater) }
        var all: [[String]] = []
        for request in requests {
            #expect(session.open(request, authorization: "secret") != nil)
            let block = try #require(session.send().frames.first { $0.kind == .headers }).payload
            var fields: [String] = []
            var place = 0
            var (field, flags) = (nghttp2_nv(), Int32(0))
            while true {
                let count = block.withUnsafeBufferPointer {
                    nghttp2_hd_inflate_hd2(inflater, &field, &flags, $0.baseAddress! + place, block.count - place, 1)
                }
                if count < 0 { break }
                place += count
                if flags & Int32(NGHTTP2_HD_INFLATE_EMIT.rawValue) != 0 { fields.append(Self.text(field)) }
                if flags & Int32(NGHTTP2_HD_INFLATE_FINAL.rawValue) != 0 { break }
            }
            nghttp2_hd_inflate_end_headers(inflater)
            all.append(fields)
        }
        let table = (62..<nghttp2_hd_inflate_get_num_table_entries(inflater) + 1).compactMap {
            nghttp2_hd_inflate_get_table_entry(inflater, $0).map { Self.text($0.pointee) }
        }
        return (all, table)
    }

    private static func text(_ field: nghttp2_nv) -> String {
        func text(_ start: UnsafeMutablePointer<UInt8>?, _ count: Int) -> String {
            String(decoding: UnsafeBufferPointer(start: start, count: count), as: UTF8.self)
        }
        return "\(text(field.name, field.namelen)): \(text(field.value, field.valuelen))"
    }

    @Test func `the server decodes all headers, and its table holds the ones that repeat`() throws {
        var requests = (1...100).map {
            request($0, token: String(repeating: "0\($0 % 10)", count: 32), collapseID: "c\($0)")
        }
        for place in requests.indices {
            requests[place].expiration = Int64(1_800_000_000 + place)
            requests[place].priority = 5
        }
        let (fields, table) = try decoded(requests)
        #expect(
            fields[99] == [
                ":method: POST", ":scheme: https", ":authority: h",
                ":path: /3/device/" + String(repeating: "00", count: 32),
                "authorization: bearer secret", "apns-topic: com.example.app", "apns-push-type: alert",
                "apns-id: \(requests[99].id)", "apns-priority: 5", "apns-expiration: 1800000099",
                "apns-collapse-id: c100",
                "content-length: 2",
            ])
        // Of the fields that differ each time, the first request's, so that the name is there.
        #expect(
            Set(table) == [
                ":authority: h", "apns-topic: com.example.app", "apns-push-type: alert", "apns-id: \(requests[0].id)",
                "apns-priority: 5", "apns-expiration: 1800000000", "apns-collapse-id: c1",
            ])
    }

    @Test func `repeated headers take few bytes`() throws {
        var session = try SessionOverMemory()
        var size = 0
        for number in 1...3 {
            #expect(session.open(request(number, token: String(repeating: "ab", count: 32))) != nil)
            size = try session.send().frames.reduce(0) { $1.kind == .headers ? $1.payload.count : $0 }
        }
        #expect(size < 110, "a token of 64 digits and an identifier of 36, and references to the table")
    }
}
