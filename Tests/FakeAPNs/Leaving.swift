import NIOCore
import NIOHTTP2

/// How a connection ends.
extension FakeConnection {
    func leave(_ goAway: FakeAnswer.GoAway, on id: HTTP2StreamID, _ apnsID: String) {
        guard let notice = goAway.notice, goneAway == nil else { return goAwayNow(goAway, on: id, apnsID) }
        writeGoAway(.maxID, code: 0, reason: nil)
        if notice != .atOnce, goAway.answers(Int(id)) { respond(200, nil, on: id, apnsID) }
        let next = { [self] in goAwayNow(goAway, on: id, apnsID) }
        switch notice {
        case .atOnce: next()
        case .time(let time): later(time, next)
        case .roundTrip:
            afterRoundTrip.append(next)
            write(.rootStream, .ping(HTTP2PingData(withInteger: UInt64(Int(id))), ack: false))
        }
    }

    private func goAwayNow(_ goAway: FakeAnswer.GoAway, on id: HTTP2StreamID, _ apnsID: String) {
        if hasEnded { return }
        let last: HTTP2StreamID =
            switch goAway.last {
            case .thisProcessed: id
            case .thisNotProcessed: id == HTTP2StreamID(1) ? .rootStream : HTTP2StreamID(Int(id) - 2)
            case .seen: latest
            case .stream(let number): HTTP2StreamID(number)
            case .maximum: .maxID
            }
        // A later GOAWAY may lower the last stream, but not raise it.
        if goneAway.map({ last < $0 }) ?? true {
            goneAway = last
            for refused in streams.keys where refused > last { refuse(refused) }
            writeGoAway(last, code: goAway.code, reason: goAway.reason)
        }
        switch goAway.closing {
        case .atOnce: end()
        case .afterStreams, .never:
            if streams[id] != nil { respond(200, nil, on: id, apnsID) }
            if goAway.closing == .afterStreams { closesWhenIdle = true }
        }
    }

    /// Drops a stream above the last one.
    private func refuse(_ id: HTTP2StreamID) {
        if let exchange = streams[id]?.exchange, !exchange.isRefused {
            let refused = FakeExchange(request: exchange.request, outcome: FakeOutcome(0, "goAway"), isRefused: true)
            core.records.takenBack(exchange, refused)
            core.options.log?(refused)
        }
        forget(id)
    }

    private func writeGoAway(_ last: HTTP2StreamID, code: Int, reason: String?) {
        var payload = ByteBuffer()
        payload.writeInteger(UInt32(Int(last)))
        payload.writeInteger(UInt32(truncatingIfNeeded: code))
        if let reason { payload.writeString(Self.body(reason, nil)) }
        writeBeneath(type: 7, on: .rootStream, payload)
    }

    func closeIfIdle() {
        if closesWhenIdle, streams.isEmpty { end() }
    }

    /// Closes our half, and the rest when the client has closed its half. Closing a socket with unread bytes resets the connection, and
    /// then the client may lose GOAWAY and answers.
    private func end() {
        guard let context, !hasEnded else { return }
        forgetAll()
        context.close(mode: .output, promise: nil)
        closeLater()
    }

    /// The same below TLS: the client gets no close_notify.
    func breakOff() {
        guard let context, !hasEnded else { return }
        forgetAll()
        let tls = try? context.pipeline.syncOperations.context(handlerType: TLSHandler.self)
        tls?.close(mode: .output, promise: nil)
        closeLater()
    }

    private func forgetAll() {
        hasEnded = true
        for id in streams.keys { forget(id) }
        flush()
    }

    private func closeLater() {
        context?.eventLoop.assumeIsolated().scheduleTask(in: .seconds(2)) { [self] in context?.close(promise: nil) }
    }
}
