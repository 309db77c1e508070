internal import TokenModel

/// What Apple's feedback service sent until 2021, saved as it came: for each token four bytes of time, two bytes of length, and the
/// token, in network byte order
/// (https://developer.apple.com/library/archive/documentation/NetworkingInternet/Conceptual/RemoteNotificationsPG/BinaryProviderAPI.html).
struct FeedbackTupleFormat: ImportFormat {
    private static let head = 6
    /// Nothing marks the beginning of a tuple: after a wrong length, nothing can be read.
    private static let longestToken = DeviceToken.maximumLength
    private static let digits = Array("0123456789abcdef".utf8)

    var hasCauses: Bool { false }
    var items: (one: String, many: String) { ("tuple", "tuples") }

    func next(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) throws(ImportProblem) -> ImportScan {
        func number(_ count: Int, at offset: Int) -> Int {
            bytes[(start + offset)..<(start + offset + count)].reduce(0) { $0 << 8 | Int($1) }
        }
        guard end - start >= Self.head else {
            return what == .more
                ? .needsMore : .found(.refused(Refusal("the last tuple is cut off")), end: end, lines: 1)
        }
        let length = number(2, at: 4)
        guard (1...Self.longestToken).contains(length) else {
            throw ImportProblem(
                "this is not the output of Apple's feedback service: a token would be \(length) bytes long, expected 1 to \(Self.longestToken)"
            )
        }
        guard end - start >= Self.head + length else {
            return what == .more
                ? .needsMore : .found(.refused(Refusal("the last tuple is cut off")), end: end, lines: 1)
        }
        row.begin()
        for byte in bytes[(start + Self.head)..<(start + Self.head + length)] {
            row.append(Self.digits[Int(byte >> 4)])
            row.append(Self.digits[Int(byte & 15)])
        }
        row.end(.token)
        row.set(.registeredAt, "\(number(4, at: 0))".utf8)
        return .found(.row, end: start + Self.head + length, lines: 1)
    }

    /// The tuple as it was: it has no place for a cause.
    func append(refused record: ArraySlice<UInt8>, line: Int, cause: String, to rejects: inout [UInt8]) {
        rejects.append(contentsOf: record)
    }
}
