internal import CNgHTTP2

/// An HTTP/2 session of a client, kept by libnghttp2: requests and received bytes in, events and bytes to send out. No I/O.
///
/// The only file with libnghttp2's pointers. Belongs to one thread. After an error, or when `isOver`, the connection cannot be used.
@safe final class HTTP2Session {
    struct Failure: Error, Equatable {
        var message: String
    }

    private struct Stream {
        var payload: [UInt8]
        var slot: Int
        var sent = 0
        var parser = ResponseParser()
        var headIsComplete = false
    }

    private let session: OpaquePointer
    private var streams: [Int32: Stream] = [:]
    private var events: [SessionEvent] = []
    /// The stream whose END_STREAM is in the frame that libnghttp2 has just made, and the slot of its request.
    private var ending: (stream: Int32, slot: Int)?
    private let observer: (any SendObserver)?
    private var headBytes = 0
    private var continuations = 0
    private var idleFrames = 0
    private var strayBytes = 0
    private var complaint: String?

    /// A header block with more bytes resets its stream. One with more CONTINUATION frames ends the session.
    static let longestHead = 65536
    static let mostContinuations = 4
    /// The most frames that may arrive between two calls of `beginPeriod` without any part of a response.
    static let mostIdleFrames = 10_000
    /// The most bytes that may arrive for no stream: libnghttp2 ignores what follows a reset, and a server may have sent a window's worth.
    static let mostStrayBytes = 16 << 20
    /// Responses never exhaust this window: libnghttp2 opens it again when half of it is used.
    private static let connectionWindow: Int32 = 1 << 24

    init(observer: (any SendObserver)? = nil) {
        self.observer = observer
        var (callbacks, option, session): (OpaquePointer?, OpaquePointer?, OpaquePointer?) = (nil, nil, nil)
        guard unsafe nghttp2_session_callbacks_new(&callbacks) == 0, unsafe nghttp2_option_new(&option) == 0 else {
            fatalError("out of memory")
        }
        unsafe Self.set(callbacks)
        unsafe nghttp2_option_set_no_closed_streams(option, 1)
        unsafe nghttp2_option_set_max_reserved_remote_streams(option, 0)
        unsafe nghttp2_option_set_max_outbound_ack(option, 500)
        guard unsafe nghttp2_session_client_new2(&session, callbacks, nil, option) == 0, let session = unsafe session
        else { fatalError("out of memory") }
        unsafe self.session = session
        unsafe nghttp2_session_set_user_data(session, Unmanaged.passUnretained(self).toOpaque())
        unsafe nghttp2_option_del(option)
        unsafe nghttp2_session_callbacks_del(callbacks)
        let settings = [
            nghttp2_settings_entry(settings_id: Int32(NGHTTP2_SETTINGS_ENABLE_PUSH.rawValue), value: 0),
            nghttp2_settings_entry(
                settings_id: Int32(NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE.rawValue), value: UInt32(Self.longestHead)),
        ]
        unsafe nghttp2_submit_settings(session, 0, settings, settings.count)
        unsafe nghttp2_session_set_local_window_size(session, 0, 0, Self.connectionWindow)
    }

    deinit {
        unsafe nghttp2_session_del(session)
    }

    /// Whether the session has nothing more to send or receive.
    var isOver: Bool {
        unsafe nghttp2_session_want_read(session) == 0 && nghttp2_session_want_write(session) == 0
    }

    func takeEvents() -> [SessionEvent] {
        if events.isEmpty { return [] }
        defer { events.removeAll(keepingCapacity: true) }
        return events
    }

    // MARK: - Requests

    /// Opens a stream for a request.
    ///
    /// - Returns: The stream; nil if the session opens no more streams.
    func open(_ headers: RequestHeaders, payload: [UInt8], slot: Int) -> Int32? {
        let count = headers.fields.count
        let stream = unsafe headers.bytes.withUnsafeBufferPointer { bytes in
            unsafe withUnsafeTemporaryAllocation(of: nghttp2_nv.self, capacity: count) { fields in
                for (place, field) in headers.fields.enumerated() {
                    let name = FieldName.all[field.name]!
                    unsafe fields.initializeElement(
                        at: place,
                        to: nghttp2_nv(
                            name: UnsafeMutablePointer(mutating: name.start),
                            value: UnsafeMutablePointer(mutating: bytes.baseAddress! + field.value.lowerBound),
                            namelen: name.count, valuelen: field.value.count, flags: Self.flags(of: field)))
                }
                var source = unsafe nghttp2_data_provider(
                    source: nghttp2_data_source(fd: 0), read_callback: Self.readPayload)
                return unsafe nghttp2_submit_request(session, nil, fields.baseAddress, count, &source, nil)
            }
        }
        guard stream > 0 else { return nil }
        streams[stream] = Stream(payload: payload, slot: slot)
        return stream
    }

    /// Ends a stream whose response is no longer needed.
    func reset(_ stream: Int32) {
        unsafe nghttp2_submit_rst_stream(session, 0, stream, HTTP2Error.cancel)
    }

    func ping() {
        unsafe nghttp2_submit_ping(session, 0, nil)
    }

    /// Tells the server that the client closes the connection.
    func leave() {
        unsafe nghttp2_session_terminate_session(session, HTTP2Error.noError)
    }

    /// The compressor never indexes `:path` and `content-length` by itself; the others need the flag. The names are static.
    private static func flags(of field: RequestHeaders.Field) -> UInt8 {
        let mayIndex = field.isIndexed || field.name == .path || field.name == .contentLength
        let flags = NGHTTP2_NV_FLAG_NO_COPY_NAME.rawValue | (mayIndex ? 0 : NGHTTP2_NV_FLAG_NO_INDEX.rawValue)
        return UInt8(flags)
    }

    // MARK: - Bytes

    /// Processes bytes from the server.
    func receive(_ bytes: UnsafeBufferPointer<UInt8>) throws(Failure) {
        let taken = unsafe nghttp2_session_mem_recv(session, bytes.baseAddress, bytes.count)
        if taken < 0 { throw failure(taken) }
        strayBytes += bytes.count
        if strayBytes > Self.mostStrayBytes { throw Failure(message: "the server sends on streams that have ended") }
    }

    /// Appends outgoing frames to the buffer until it has at least `limit` bytes, or until no frame is left.
    func produce(into output: inout OutputBuffer, atLeast limit: Int) throws(Failure) {
        while output.count < limit {
            ending = nil
            var frame: UnsafePointer<UInt8>?
            let count = unsafe nghttp2_session_mem_send(session, &frame)
            if count < 0 { throw failure(count) }
            if count == 0 { return }
            unsafe output.append(UnsafeBufferPointer(start: frame, count: count))
            if let ending {
                output.markEnd(of: ending.stream)
                observer?.maySend(ending.slot)
            }
        }
    }

    /// Resets the count of frames without any part of a response.
    func beginPeriod() {
        idleFrames = 0
    }

    /// libnghttp2's last complaint about the server.
    var lastComplaint: String? { complaint }

    private func failure(_ code: Int) -> Failure {
        let text = unsafe String(cString: nghttp2_strerror(Int32(code)))
        return Failure(message: complaint ?? text)
    }
}

// MARK: - What libnghttp2 calls

extension HTTP2Session {
    private static let goesOn: Int32 = 0
    private static let endsSession = Int32(NGHTTP2_ERR_CALLBACK_FAILURE.rawValue)
    private static let endsStream = Int32(NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE.rawValue)

    private static func at(_ address: UnsafeMutableRawPointer?) -> HTTP2Session {
        unsafe Unmanaged<HTTP2Session>.fromOpaque(address!).takeUnretainedValue()
    }

    private static func set(_ callbacks: OpaquePointer?) {
        unsafe nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks) { _, frame, this in
            unsafe HTTP2Session.at(this).begins(frame!.pointee)
        }
        unsafe nghttp2_session_callbacks_set_on_header_callback(callbacks) {
            _, frame, name, nameCount, value, valueCount, _, this in
            // The fields of a PUSH_PROMISE belong to a request.
            guard unsafe UInt32(frame!.pointee.hd.type) == NGHTTP2_HEADERS.rawValue else { return HTTP2Session.goesOn }
            return unsafe HTTP2Session.at(this).takes(
                UnsafeBufferPointer(start: name, count: nameCount).span,
                UnsafeBufferPointer(start: value, count: valueCount).span, on: frame!.pointee.hd.stream_id)
        }
        unsafe nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks) { _, frame, this in
            unsafe HTTP2Session.at(this).received(frame!)
            return HTTP2Session.goesOn
        }
        unsafe nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks) {
            _, _, stream, bytes, count, this in
            unsafe HTTP2Session.at(this).takes(UnsafeBufferPointer(start: bytes, count: count).span, on: stream)
            return HTTP2Session.goesOn
        }
        unsafe nghttp2_session_callbacks_set_on_stream_close_callback(callbacks) { _, stream, code, this in
            unsafe HTTP2Session.at(this).closed(stream, code)
            return HTTP2Session.goesOn
        }
        unsafe nghttp2_session_callbacks_set_error_callback2(callbacks) { _, _, text, count, this in
            let text = unsafe UnsafeRawBufferPointer(start: text, count: count)
            unsafe HTTP2Session.at(this).complaint = String(decoding: text, as: UTF8.self)
            return HTTP2Session.goesOn
        }
    }

    private static let readPayload: nghttp2_data_source_read_callback = { _, stream, buffer, room, flags, _, this in
        let session = unsafe HTTP2Session.at(this)
        let count = unsafe session.read(stream, into: UnsafeMutableRawBufferPointer(start: buffer, count: room))
        if session.ending?.stream == stream { unsafe flags!.pointee |= NGHTTP2_DATA_FLAG_EOF.rawValue }
        return count
    }

    private func read(_ stream: Int32, into buffer: UnsafeMutableRawBufferPointer) -> Int {
        guard let place = streams.index(forKey: stream) else { return Int(Self.endsStream) }
        let (sent, size) = (streams.values[place].sent, streams.values[place].payload.count)
        let count = min(buffer.count, size - sent)
        unsafe streams.values[place].payload.withUnsafeBytes { bytes in
            unsafe buffer.copyMemory(from: UnsafeRawBufferPointer(rebasing: bytes[sent..<sent + count]))
        }
        streams.values[place].sent += count
        if sent + count == size { ending = (stream, streams.values[place].slot) }
        return count
    }

    private func begins(_ head: nghttp2_frame_hd) -> Int32 {
        if head.type != NGHTTP2_DATA.rawValue || streams[head.stream_id] != nil { strayBytes -= 9 + head.length }
        switch UInt32(head.type) {
        case NGHTTP2_HEADERS.rawValue, NGHTTP2_PUSH_PROMISE.rawValue: (headBytes, continuations) = (0, 0)
        case NGHTTP2_CONTINUATION.rawValue: continuations += 1
        default: break
        }
        idleFrames += 1
        if continuations <= Self.mostContinuations, idleFrames <= Self.mostIdleFrames { return Self.goesOn }
        complaint = "the server floods the connection with frames"
        return Self.endsSession
    }

    private func takes(_ name: Span<UInt8>, _ value: Span<UInt8>, on stream: Int32) -> Int32 {
        // The size as RFC 9113, 6.5.2, defines it.
        headBytes += name.count + value.count + 32
        if headBytes > Self.longestHead { return Self.endsStream }
        // Trailers are ignored.
        guard let place = streams.index(forKey: stream), !streams.values[place].headIsComplete else {
            return Self.goesOn
        }
        streams.values[place].parser.take(name: name, value: value)
        return Self.goesOn
    }

    private func takes(_ piece: Span<UInt8>, on stream: Int32) {
        guard let place = streams.index(forKey: stream) else { return }
        if piece.count > 0 { idleFrames = 0 }
        if streams.values[place].parser.take(piece: piece) { return }
        reset(stream)
        closed(stream, HTTP2Error.cancel)  // The reset may have to wait until the server reads.
    }

    private func received(_ frame: UnsafePointer<nghttp2_frame>) {
        let head = unsafe frame.pointee.hd
        switch UInt32(head.type) {
        case NGHTTP2_HEADERS.rawValue, NGHTTP2_DATA.rawValue:
            let ends = UInt32(head.flags) & NGHTTP2_FLAG_END_STREAM.rawValue != 0
            received(on: head.stream_id, isHead: UInt32(head.type) == NGHTTP2_HEADERS.rawValue, ends: ends)
        case NGHTTP2_SETTINGS.rawValue where UInt32(head.flags) & NGHTTP2_FLAG_ACK.rawValue == 0:
            let most = unsafe nghttp2_session_get_remote_settings(session, NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS)
            events.append(.settings(mostStreams: Int(most)))
        case NGHTTP2_GOAWAY.rawValue:
            let frame = unsafe frame.pointee.goaway
            let data = unsafe UnsafeBufferPointer(start: frame.opaque_data, count: frame.opaque_data_len)
            let goAway = unsafe PushGoAway(code: frame.error_code, data: data)
            events.append(.goAway(last: unsafe frame.last_stream_id, goAway))
        default: break
        }
    }

    private func received(on stream: Int32, isHead: Bool, ends: Bool) {
        guard let place = streams.index(forKey: stream), let answer = streams.values[place].parser.answer else {
            return
        }
        if isHead { idleFrames = 0 }
        if ends {
            events.append(.answer(stream, answer))
        } else if isHead, !streams.values[place].headIsComplete {
            events.append(.head(stream, answer))
        }
        streams.values[place].headIsComplete = true
    }

    private func closed(_ stream: Int32, _ code: UInt32) {
        guard streams.removeValue(forKey: stream) != nil else { return }
        events.append(.closed(stream, code: code))
    }
}
