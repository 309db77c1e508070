internal import CCurl
internal import TokenModel

/// The memory that the connections of a client read into, one at a time.
@safe final class ReadBuffer {
    fileprivate let bytes = UnsafeMutableRawBufferPointer.allocate(byteCount: 64 << 10, alignment: 16)

    deinit {
        unsafe bytes.deallocate()
    }
}

/// An HTTP/2 session over a TLS connection. Moves bytes between the two and makes no decisions.
final class Link {
    struct Lost: Error {
        var kind = PushFailure.Kind.connectionLost
        var message: String
    }

    let tls: TLSConnection
    let session: HTTP2Session
    var indexed: RequestHeaders.Indexed = []
    private(set) var isOpen = false
    private var output = OutputBuffer()
    /// What the last incomplete write or read waits for.
    private var writeWaits = Wait.nothing
    private var readWaits = Wait.nothing
    private var mayRead = true
    private var mayWrite = true

    private enum Wait { case nothing, reading, writing }

    /// How many bytes to take from the session at a time.
    private static let chunk = 64 << 10

    init(_ tls: TLSConnection, _ observer: (any SendObserver)?) {
        self.tls = tls
        session = HTTP2Session(observer: observer)
    }

    var isPending: Bool { !output.isEmpty }

    /// The TLS handshake has ended: checks that the server speaks HTTP/2, and reads what it has sent.
    func open(_ buffer: ReadBuffer, host: String) throws(Lost) {
        tls.opened()
        isOpen = true
        // Before the first read, libcurl does not show the TLS connection.
        let first = unsafe tls.receive(into: buffer.bytes)
        guard tls.hasAgreedOnHTTP2 else {
            if case .ended(let message) = first { throw Lost(kind: .connect, message: message) }
            throw Lost(kind: .protocolError, message: "\(host) does not support HTTP/2")
        }
        try take(first, buffer)
        try read(buffer)
    }

    /// Whether there may be more to read without waiting.
    var hasMore: Bool { isOpen && mayRead }

    /// The most reads in a row. A server that never stops sending must not delay the other connections.
    private static let mostReads = 64

    /// Reads until nothing is left, but at most `mostReads` times.
    ///
    /// - Returns: Whether anything was read.
    @discardableResult func read(_ buffer: ReadBuffer) throws(Lost) -> Bool {
        var hasHeard = false
        var reads = 0
        while mayRead, reads < Self.mostReads {
            reads += 1
            try take(unsafe tls.receive(into: buffer.bytes), buffer)
            hasHeard = hasHeard || mayRead
        }
        return hasHeard
    }

    private func take(_ transferred: TLSConnection.Transferred, _ buffer: ReadBuffer) throws(Lost) {
        switch transferred {
        case .again:
            mayRead = false
            readWaits = tls.waitsForWriting ? .writing : .reading
        case .ended(let message): throw Lost(message: message)
        case .bytes(let count):
            do {
                let bytes = unsafe UnsafeRawBufferPointer(rebasing: buffer.bytes[..<count])
                try unsafe session.receive(bytes.assumingMemoryBound(to: UInt8.self))
            } catch { throw Lost(kind: .protocolError, message: error.message) }
        }
    }

    struct Written {
        /// The streams whose requests were written completely, even if the connection was lost afterwards.
        var ends: [Int32] = []
        var hasMoved = false
        var lost: Lost?
    }

    /// Writes what the session has to send, as much as TLS takes.
    func flush() -> Written {
        var written = Written()
        while mayWrite, written.lost == nil {
            do { try session.produce(into: &output, atLeast: Self.chunk) } catch {
                written.lost = Lost(kind: .protocolError, message: error.message)
                break
            }
            if output.isEmpty { break }
            switch unsafe output.withBytes({ unsafe tls.send($0) }) {
            case .bytes(let count):
                written.ends += output.remove(count)
                written.hasMoved = true
            case .again:
                mayWrite = false
                writeWaits = tls.waitsForWriting ? .writing : .reading
            case .ended(let message): written.lost = Lost(message: reasonToEnd() ?? message)
            }
        }
        if written.lost == nil, session.isOver {
            written.lost = Lost(kind: .protocolError, message: session.lastComplaint ?? "the session has ended")
        }
        return written
    }

    /// What the server has said before it closed the connection, which a write does not show: a TLS alert, such as that of a refused certificate.
    private func reasonToEnd() -> String? {
        var few = [UInt8](repeating: 0, count: 1024)
        let last = unsafe few.withUnsafeMutableBytes { unsafe tls.receive(into: $0) }
        if case .ended(let message) = last { return message }
        return nil
    }

    /// The events to wait for.
    var poll: curl_waitfd {
        var events = Int16(CURL_WAIT_POLLIN)
        if (isPending && writeWaits == .writing) || readWaits == .writing { events |= Int16(CURL_WAIT_POLLOUT) }
        return curl_waitfd(fd: tls.socket, events: events, revents: 0)
    }

    /// Takes the events that ended the wait.
    func polled(_ events: Int16) {
        if events == 0 { return }
        let isReadable = events & Int16(CURL_WAIT_POLLIN) != 0
        let isWritable = events & Int16(CURL_WAIT_POLLOUT) != 0
        if isReadable || isWritable && readWaits == .writing { mayRead = true }
        if isWritable || isReadable && writeWaits == .reading { mayWrite = true }
    }
}
