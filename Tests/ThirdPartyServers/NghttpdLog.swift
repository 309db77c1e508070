import Foundation
import LedgerTestSupport

/// The requests in the log of `nghttpd --verbose --hexdump`: its own decoding of each field, and the bytes themselves, after TLS.
struct NghttpdLog {
    struct Field: Equatable {
        var name: String
        var value: String
        /// Whether the client marked the field as one that no proxy may index.
        var isSensitive: Bool
        var form: Form
    }

    /// How a field was encoded. RFC 7541, 6.
    enum Form {
        /// A reference to a whole entry of the table.
        case indexed
        /// A literal that enters the table.
        case added
        /// A literal that does not, with or without the mark for proxies.
        case notIndexed, neverIndexed
    }

    struct Request {
        /// In the order of the request.
        var fields: [Field] = []
        var payload: [UInt8] = []

        func field(_ name: String) -> Field? { fields.first { $0.name == name } }
    }

    /// In the order of their streams.
    let requests: [Request]

    /// - Parameter text: The log of a server with one connection.
    init(_ text: String) throws {
        let lines = text.split(separator: "\n")
        var requests: [Int: Request] = [:]
        var forms: [Int: [Form]] = [:]
        for frame in try Self.frames(Self.bytes(lines)) {
            switch frame.type {
            case Self.headers:
                guard forms[frame.stream] == nil, frame.flags & ~Self.endStream == Self.endHeaders else {
                    throw TestFailure(
                        "stream \(frame.stream): expected one HEADERS frame, without priority and padding")
                }
                forms[frame.stream] = try Self.forms(frame.payload)
            case Self.data: requests[frame.stream, default: Request()].payload += frame.payload
            default: break
            }
        }
        let pattern = #/recv \(stream_id=([0-9]+)(, sensitive)?\) (:?[^:]+): (.*)/#
        for line in lines {
            guard let match = line.firstMatch(of: pattern), let stream = Int(match.1) else { continue }
            let place = requests[stream]?.fields.count ?? 0
            guard let all = forms[stream], place < all.count else { throw TestFailure("no bytes for: \(line)") }
            requests[stream, default: Request()].fields.append(
                Field(
                    name: String(match.3), value: String(match.4), isSensitive: match.2 != nil, form: all[place]))
        }
        for (stream, forms) in forms where requests[stream]?.fields.count != forms.count {
            throw TestFailure("stream \(stream): \(forms.count) fields in its bytes, other fields in the log")
        }
        self.requests = requests.sorted { $0.key < $1.key }.map(\.value)
    }

    // Bytes ---------------------------------------------------------------------------------------------------------

    /// All that the client has sent. Each read begins at 0; `*` stands for lines like the one before.
    private static func bytes(_ lines: [Substring]) -> [UInt8] {
        var all: [UInt8] = []
        var (start, isRepeated) = (0, false)
        for line in lines {
            if line == "*" { isRepeated = true }
            guard let match = line.firstMatch(of: #/^([0-9a-f]{8})(  [0-9a-f ]+  \|.*)?$/#),
                let offset = Int(match.1, radix: 16)
            else { continue }
            if offset == 0 { start = all.count }
            if isRepeated {
                while all.count < start + offset { all += all.suffix(16) }
                isRepeated = false
            }
            let digits = match.2?.prefix { $0 != "|" } ?? ""
            all += digits.split(separator: " ").compactMap { UInt8($0, radix: 16) }
        }
        return all
    }

    private static let (data, headers): (UInt8, UInt8) = (0, 1)
    private static let (endStream, endHeaders): (UInt8, UInt8) = (1, 4)
    private static let preface = Array("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".utf8)

    private struct Frame {
        var type: UInt8
        var flags: UInt8
        var stream: Int
        var payload: ArraySlice<UInt8>
    }

    private static func frames(_ bytes: [UInt8]) throws -> [Frame] {
        guard bytes.starts(with: preface) else { throw TestFailure("the log has no HTTP/2: \(bytes.prefix(24))") }
        var frames: [Frame] = []
        var rest = bytes.dropFirst(preface.count)
        while rest.count >= 9 {
            let head = Array(rest.prefix(9))
            let size = head[..<3].reduce(0) { $0 << 8 | Int($1) }
            let stream = head[5...].reduce(0) { $0 << 8 | Int($1) }
            guard rest.count >= 9 + size else { break }
            frames.append(
                Frame(type: head[3], flags: head[4], stream: stream, payload: rest.dropFirst(9).prefix(size)))
            rest = rest.dropFirst(9 + size)
        }
        return frames
    }

    /// The form of each field of a block. RFC 7541, 5 and 6.
    private static func forms(_ block: ArraySlice<UInt8>) throws -> [Form] {
        var rest = block
        func integer(_ bits: Int) throws -> Int {
            guard let first = rest.popFirst() else { throw TestFailure("a block of fields is cut short") }
            let most = (1 << bits) - 1
            var (value, shift) = (Int(first) & most, 0)
            guard value == most else { return value }
            while let byte = rest.popFirst() {
                value += Int(byte & 127) << shift
                shift += 7
                if byte & 128 == 0 { break }
            }
            return value
        }
        func skipText() throws {
            let count = try integer(7)
            rest = rest.dropFirst(count)
        }
        var forms: [Form] = []
        while let first = rest.first {
            let (form, bits): (Form?, Int) =
                switch first.leadingZeroBitCount {
                case 0: (.indexed, 7)
                case 1: (.added, 6)
                case 2: (nil, 5)
                case 3: (.neverIndexed, 4)
                default: (.notIndexed, 4)
                }
            let index = try integer(bits)
            // A change of the table's size is no field.
            guard let form else { continue }
            if form != .indexed {
                if index == 0 { try skipText() }
                try skipText()
            }
            forms.append(form)
        }
        return forms
    }
}
