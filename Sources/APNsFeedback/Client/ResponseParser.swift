/// Collects a response header by header and piece by piece. Accepts whatever a server sends.
struct ResponseParser: Equatable {
    /// The status of the last status line; zero before the first.
    private(set) var status: Int32 = 0
    /// Whether that line named HTTP/2.
    private(set) var isHTTP2 = false
    private(set) var body: [UInt8] = []
    /// The length of the body so far, including what is not kept.
    private(set) var length = 0
    private var apnsID: String?
    private var uniqueID: String?

    /// How many bytes of a body are kept. APNs sends fewer than 100.
    static let kept = 4096
    /// A longer body is not read to its end.
    static let longest = 1 << 20
    private static let longestIdentifier = 100

    /// Prepares for another response; keeps the memory.
    mutating func clear() {
        status = 0
        isHTTP2 = false
        body.removeAll(keepingCapacity: true)
        length = 0
        apnsID = nil
        uniqueID = nil
    }

    /// Takes one line of the head as libcurl passes it: a status line, a header, or the empty line at the end.
    mutating func take(line: Span<UInt8>) {
        if Self.starts(line, with: "HTTP/") {
            takeStatus(line)
        } else if Self.starts(line, with: "apns-id:") {
            apnsID = Self.value(line, after: 8)
        } else if Self.starts(line, with: "apns-unique-id:") {
            uniqueID = Self.value(line, after: 15)
        }
    }

    /// Takes a piece of the body.
    ///
    /// - Returns: False if the body is too long.
    mutating func take(piece: Span<UInt8>) -> Bool {
        length += piece.count
        var place = 0
        while body.count < Self.kept, place < piece.count {
            body.append(piece[place])
            place += 1
        }
        return length <= Self.longest
    }

    /// Whether the status ends the exchange: 200 and above.
    var hasFinalStatus: Bool { status >= 200 }

    /// The response, assuming that it is complete; nil without a final status.
    var answer: PushResponse? {
        guard hasFinalStatus else { return nil }
        return PushResponse(
            status: status, body: body.isEmpty ? nil : String(decoding: body, as: UTF8.self), apnsID: apnsID,
            uniqueID: uniqueID)
    }

    /// Whether the end of the body seems to be missing. libcurl does not notice: it takes a stream that was reset with NO_ERROR for
    /// a complete response, and a 410 that lost its timestamp would mean something else. A 200 is never torn: its notification
    /// was accepted, and would be delivered twice if the request were repeated.
    var isTorn: Bool {
        if length > Self.kept || status == 200 { return false }
        if body.isEmpty { return status == 410 }
        return body.first == UInt8(ascii: "{") && !body.reversed().drop(while: { $0 <= 0x20 }).starts(with: [0x7d])
    }

    private mutating func takeStatus(_ line: Span<UInt8>) {
        // Of several, such as 103 and 200, the last one counts, with its headers.
        clear()
        isHTTP2 = Self.starts(line, with: "HTTP/2 ")
        var place = 5
        while place < line.count, line[place] != 0x20 { place += 1 }
        place += 1
        let digits = place
        var value: Int32 = 0
        while place < line.count, place - digits < 3, UInt8(ascii: "0")...UInt8(ascii: "9") ~= line[place] {
            value = value * 10 + Int32(line[place] - UInt8(ascii: "0"))
            place += 1
        }
        status = value
    }

    /// Upper and lower case are equal, as in HTTP.
    private static func starts(_ line: Span<UInt8>, with literal: String) -> Bool {
        let text = literal.utf8.span
        guard line.count >= text.count else { return false }
        for place in 0..<text.count {
            let (found, expected) = (line[place], text[place])
            if found == expected { continue }
            guard UInt8(ascii: "a")...UInt8(ascii: "z") ~= expected | 0x20, found | 0x20 == expected | 0x20 else {
                return false
            }
        }
        return true
    }

    private static func value(_ line: Span<UInt8>, after start: Int) -> String? {
        var value: [UInt8] = []
        for place in start..<line.count where value.count < longestIdentifier {
            let byte = line[place]
            if 0x21...0x7e ~= byte || (byte == 0x20 && !value.isEmpty) { value.append(byte) }
        }
        while value.last == 0x20 { value.removeLast() }
        return value.isEmpty ? nil : String(decoding: value, as: UTF8.self)
    }
}
