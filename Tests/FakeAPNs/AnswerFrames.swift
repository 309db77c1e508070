import NIOCore
import NIOHPACK
import NIOHTTP2

/// Writes the frames of an answer.
extension FakeConnection {
    func perform(_ answer: FakeAnswer, on id: HTTP2StreamID, _ apnsID: String) {
        // The client may have reset it meanwhile, or a GOAWAY refused it.
        guard streams[id] != nil else { return }
        if let settings = answer.settings { change(settings) }
        switch answer.action {
        case .status(let status, let reason, let timestamp):
            let body = reason.map { Self.body($0, timestamp) }
            if let manner = answer.manner {
                let bytes = Array((body ?? "").utf8)
                respond(head(status, apnsID), .init(status: "", body: bytes), manner, on: id)
            } else {
                respond(status, body, on: id, apnsID)
            }
        case .raw(let raw):
            var head = HPACKHeaders([(":status", raw.status)])
            for (name, value) in raw.headers { head.add(name: name, value: value) }
            respond(head, raw, answer.manner ?? .init(), on: id)
        case .never: break
        case .reset(let code):
            write(id, .rstStream(HTTP2ErrorCode(networkCode: code)))
            forget(id)
        case .goAway(let goAway): leave(goAway, on: id, apnsID)
        case .close: context?.channel.dropped()
        }
    }

    func respond(_ status: Int, _ body: String?, on id: HTTP2StreamID, _ apnsID: String) {
        write(id, .headers(.init(headers: head(status, apnsID), endStream: body == nil)))
        if let body { write(id, .data(.init(data: .byteBuffer(ByteBuffer(string: body)), endStream: true))) }
        forget(id)
    }

    private func head(_ status: Int, _ apnsID: String) -> HPACKHeaders {
        var headers = HPACKHeaders()
        headers.reserveCapacity(3)
        headers.add(name: ":status", value: status == 200 ? "200" : String(status))
        // It is different in each answer: in the table, it would only push others out.
        headers.add(name: "apns-id", value: apnsID, indexing: .nonIndexable)
        if core.options.datesAnswers {
            headers.add(name: "date", value: HTTPDate.text(core.options.now()), indexing: .nonIndexable)
        }
        if core.options.sandbox {
            headers.add(name: "apns-unique-id", value: identifiers.next(), indexing: .nonIndexable)
        }
        return headers
    }

    /// As Apple writes it, to the byte.
    static func body(_ reason: String, _ timestamp: Int64?) -> String {
        if let timestamp {
            "{\"reason\":\"\(reason)\",\"timestamp\":\(timestamp)}"
        } else {
            "{\"reason\":\"\(reason)\"}"
        }
    }

    /// - Parameter raw: The body and the end. The head is another parameter.
    private func respond(
        _ head: HPACKHeaders, _ raw: FakeAnswer.Raw, _ manner: FakeAnswer.Manner, on id: HTTP2StreamID
    ) {
        for status in manner.informational {
            write(id, .headers(.init(headers: [":status": String(status)], endStream: false)))
        }
        var ends = if case .normally = raw.end { true } else { false }
        var body = ByteBuffer(bytes: raw.body)
        if let bytes = manner.cut?.after {
            ends = false
            body = body.readSlice(length: min(bytes, body.readableBytes)) ?? body
        }
        let endsWithHead = ends && body.readableBytes == 0 && raw.bodyDelay == .zero && manner.trailers.isEmpty
        write(id, .headers(.init(headers: head, endStream: endsWithHead)))
        let rest = { [self] in
            if !endsWithHead, body.readableBytes > 0 || (ends && manner.trailers.isEmpty) {
                write(id, .data(.init(data: .byteBuffer(body), endStream: ends && manner.trailers.isEmpty)))
                // Otherwise a reset would overtake the bytes that wait for the client's window.
                if !ends || manner.cut != nil { flush() }
            }
            if ends, !manner.trailers.isEmpty {
                let trailers = HPACKHeaders(manner.trailers.map { ($0.name, $0.value) })
                write(id, .headers(.init(headers: trailers, endStream: true)))
            }
            finish(raw.end, manner.cut, on: id)
        }
        if raw.bodyDelay == .zero { return rest() }
        later(raw.bodyDelay) { [self] in
            if streams[id] != nil { rest() }
        }
    }

    private func finish(_ end: FakeAnswer.Raw.End, _ cut: FakeAnswer.Cut?, on id: HTTP2StreamID) {
        switch (cut?.way, end) {
        case (.close?, _): breakOff()
        case (.reset(let code)?, _):
            if cut?.after == nil {
                // NIO considers the stream closed and would not reset it. First, NIO must write what it holds.
                flush()
                writeBeneath(type: 3, on: id, ByteBuffer(integer: UInt32(truncatingIfNeeded: code)))
            } else {
                write(id, .rstStream(HTTP2ErrorCode(networkCode: code)))
            }
            forget(id)
        case (nil, .normally): forget(id)
        case (nil, .never): break
        case (nil, .reset(let code)):
            write(id, .rstStream(HTTP2ErrorCode(networkCode: code)))
            forget(id)
        }
    }
}
