internal import CCurl
internal import TokenModel

/// Collects a response field by field and piece by piece. Accepts whatever a server sends.
struct ResponseParser: Equatable {
    /// The status of the last head; zero before the first.
    private(set) var status: Int32 = 0
    private(set) var body: [UInt8] = []
    /// The length of the body so far, including the part that is not kept.
    private(set) var length = 0
    private var apnsID: String?
    private var uniqueID: String?
    private var answeredAt: Instant?

    /// How many bytes of a body are kept. APNs sends fewer than 100.
    static let kept = 4096
    /// The stream of a longer body is reset.
    static let longest = 1 << 20
    private static let longestIdentifier = 100

    /// Takes a header field. A status begins a new header block: if there are several, such as 103 and then 200, the last one counts.
    mutating func take(name: Span<UInt8>, value: Span<UInt8>) {
        if Self.equal(name, ":status") {
            self = ResponseParser()
            status = Self.status(value)
        } else if Self.equal(name, "apns-id") {
            apnsID = Self.identifier(value)
        } else if Self.equal(name, "apns-unique-id") {
            uniqueID = Self.identifier(value)
        } else if Self.equal(name, "date") {
            answeredAt = Self.instant(value)
        }
    }

    /// Takes a piece of the body.
    ///
    /// - Returns: False if the body is too long.
    mutating func take(piece: Span<UInt8>) -> Bool {
        length += piece.count
        let more = min(piece.count, Self.kept - body.count)
        if more > 0 {
            unsafe piece.withUnsafeBufferPointer { bytes in unsafe body.append(contentsOf: bytes[..<more]) }
        }
        return length <= Self.longest
    }

    /// Whether the status ends the exchange: 200 and above.
    var hasFinalStatus: Bool { status >= 200 }

    /// The response as received so far; nil without a final status.
    var answer: PushResponse? {
        guard hasFinalStatus else { return nil }
        return PushResponse(
            status: status, body: body.isEmpty ? nil : String(decoding: body, as: UTF8.self), apnsID: apnsID,
            uniqueID: uniqueID, answeredAt: answeredAt)
    }

    /// Zero unless there are three digits.
    private static func status(_ text: Span<UInt8>) -> Int32 {
        guard text.count == 3 else { return 0 }
        var value: Int32 = 0
        for place in 0..<3 {
            guard UInt8(ascii: "0")...UInt8(ascii: "9") ~= text[place] else { return 0 }
            value = value * 10 + Int32(text[place] - UInt8(ascii: "0"))
        }
        return value
    }

    /// In HTTP/2, names are in lower case.
    private static func equal(_ name: Span<UInt8>, _ literal: String) -> Bool {
        let text = literal.utf8.span
        guard name.count == text.count else { return false }
        for place in 0..<text.count where name[place] != text[place] { return false }
        return true
    }

    /// The time in a `date` header. Nil unless it lies between 1970 and 9999.
    private static func instant(_ text: Span<UInt8>) -> Instant? {
        guard let text = identifier(text) else { return nil }
        let seconds = unsafe Int64(curl_getdate(text, nil))
        return 0..<253_402_300_800 ~= seconds ? Instant(microseconds: seconds * 1_000_000) : nil
    }

    private static func identifier(_ text: Span<UInt8>) -> String? {
        var value: [UInt8] = []
        for place in 0..<text.count where value.count < longestIdentifier {
            let byte = text[place]
            if 0x21...0x7e ~= byte || (byte == 0x20 && !value.isEmpty) { value.append(byte) }
        }
        while value.last == 0x20 { value.removeLast() }
        return value.isEmpty ? nil : String(decoding: value, as: UTF8.self)
    }
}
