/// HTTP/2 frames as bytes, the way a server writes them: right ones and wrong ones (RFC 9113, 4 and 6; RFC 7541, 6.2.2).
enum Frames {
    enum Kind: UInt8 {
        case data, headers, priority, reset, settings, pushPromise, ping, goAway, windowUpdate, continuation
    }

    static let endStream: UInt8 = 1
    static let acknowledged: UInt8 = 1
    static let endHeaders: UInt8 = 4

    static func frame(_ kind: Kind, _ flags: UInt8 = 0, on stream: Int32 = 0, _ payload: [UInt8] = []) -> [UInt8] {
        frame(type: kind.rawValue, flags, on: stream, payload)
    }

    static func frame(type: UInt8, _ flags: UInt8, on stream: Int32, _ payload: [UInt8]) -> [UInt8] {
        let count = payload.count
        return [UInt8(count >> 16 & 255), UInt8(count >> 8 & 255), UInt8(count & 255), type, flags]
            + word(UInt32(bitPattern: stream)) + payload
    }

    static func word(_ value: UInt32) -> [UInt8] {
        [UInt8(value >> 24), UInt8(value >> 16 & 255), UInt8(value >> 8 & 255), UInt8(value & 255)]
    }

    enum Setting: UInt8 {
        case tableSize = 1
        case enablePush, mostStreams, initialWindow, frameSize, headSize
    }

    static func settings(_ settings: [(Setting, UInt32)] = []) -> [UInt8] {
        frame(.settings, 0, on: 0, settings.flatMap { [0, $0.rawValue] + word($1) })
    }

    static let settingsAcknowledged = frame(.settings, acknowledged)

    /// Literal fields without indexing; names and values of up to 126 bytes.
    static func block(_ fields: [(String, String)]) -> [UInt8] {
        var bytes: [UInt8] = []
        for (name, value) in fields {
            bytes += [0, UInt8(name.utf8.count)]
            bytes += Array(name.utf8)
            bytes.append(UInt8(value.utf8.count))
            bytes += Array(value.utf8)
        }
        return bytes
    }

    static func head(_ stream: Int32, _ status: String, _ fields: [(String, String)] = [], ends: Bool = false)
        -> [UInt8]
    {
        frame(.headers, endHeaders | (ends ? endStream : 0), on: stream, block([(":status", status)] + fields))
    }

    static func trailers(_ stream: Int32, _ fields: [(String, String)]) -> [UInt8] {
        frame(.headers, endHeaders | endStream, on: stream, block(fields))
    }

    static func data(_ stream: Int32, _ text: String, ends: Bool = true) -> [UInt8] {
        frame(.data, ends ? endStream : 0, on: stream, Array(text.utf8))
    }

    /// A whole response.
    static func answer(_ stream: Int32, _ status: String, _ body: String? = nil) -> [UInt8] {
        let id = status == "200" ? [("apns-id", "00000000-0000-4000-8000-000000000000")] : []
        guard let body else { return head(stream, status, id, ends: true) }
        return head(stream, status) + data(stream, body)
    }

    static func reset(_ stream: Int32, code: UInt32) -> [UInt8] { frame(.reset, 0, on: stream, word(code)) }

    static func goAway(last: Int32, code: UInt32 = 0, _ text: String = "") -> [UInt8] {
        frame(.goAway, 0, on: 0, word(UInt32(bitPattern: last)) + word(code) + Array(text.utf8))
    }

    static func windowUpdate(_ stream: Int32, by increment: UInt32) -> [UInt8] {
        frame(.windowUpdate, 0, on: stream, word(increment))
    }
}

/// Cuts bytes into frames.
struct FrameReader {
    struct Frame: Equatable {
        var type: UInt8
        var flags: UInt8
        var stream: Int32
        var payload: [UInt8]

        var kind: Frames.Kind? { Frames.Kind(rawValue: type) }
        var endsStream: Bool { [.data, .headers].contains(kind) && flags & Frames.endStream != 0 }
        var isAcknowledgement: Bool { [.settings, .ping].contains(kind) && flags & Frames.acknowledged != 0 }
        /// The first four bytes: RST_STREAM's code, the last stream of GOAWAY, or the increment.
        var word: UInt32 { payload.prefix(4).reduce(0) { $0 << 8 | UInt32($1) } }
    }

    private var bytes: [UInt8] = []
    /// What a client sends first.
    private var isPrefaceMissing = true
    private static let preface = Array("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".utf8)

    /// - Returns: The frames that are complete now.
    mutating func add(_ more: some Sequence<UInt8>) -> [Frame] {
        bytes += more
        if isPrefaceMissing {
            guard bytes.count >= Self.preface.count else { return [] }
            precondition(bytes.starts(with: Self.preface), "it does not begin as HTTP/2")
            bytes.removeFirst(Self.preface.count)
            isPrefaceMissing = false
        }
        var frames: [Frame] = []
        var start = 0
        while bytes.count - start >= 9 {
            let size = Int(bytes[start]) << 16 | Int(bytes[start + 1]) << 8 | Int(bytes[start + 2])
            guard bytes.count - start >= 9 + size else { break }
            let stream = bytes[start + 5..<start + 9].reduce(UInt32(0)) { $0 << 8 | UInt32($1) }
            frames.append(
                Frame(
                    type: bytes[start + 3], flags: bytes[start + 4], stream: Int32(stream & 0x7fff_ffff),
                    payload: Array(bytes[start + 9..<start + 9 + size])))
            start += 9 + size
        }
        bytes.removeFirst(start)
        return frames
    }
}
