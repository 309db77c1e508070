/// The bytes that the session has produced and TLS has not taken yet, and where in them each request ends.
///
/// A request counts as sent when TLS has taken the last byte of its END_STREAM frame. Before that, no server can have it: TLS sends
/// bytes in encrypted records, and a server cannot read a record of which a part is missing.
struct OutputBuffer {
    private var bytes: [UInt8] = []
    /// How many bytes at the front of `bytes` TLS has taken. They are removed together, so that the others need not move.
    private var taken = 0
    /// Each stream whose request ends in `bytes`, with the number of bytes up to that end. In order.
    private var ends: [(offset: Int, stream: Int32)] = []
    /// How many of `ends` lie within the bytes that TLS has taken.
    private var endsTaken = 0

    /// How many bytes an empty buffer keeps room for.
    private static let kept = 4 << 10

    /// The bytes that TLS has not taken.
    var count: Int { bytes.count - taken }
    var isEmpty: Bool { count == 0 }

    mutating func append(_ frame: UnsafeBufferPointer<UInt8>) {
        unsafe bytes.append(contentsOf: frame)
    }

    /// The frame that was just appended ends this stream's request.
    mutating func markEnd(of stream: Int32) {
        ends.append((bytes.count, stream))
    }

    /// Passes the bytes that TLS has not taken. After an incomplete write, OpenSSL requires the next one to begin with the same bytes;
    /// `append` only adds bytes behind them (`SSL_write(3)`).
    func withBytes<Answer>(_ use: (UnsafeRawBufferPointer) -> Answer) -> Answer {
        unsafe bytes.withUnsafeBytes { unsafe use(UnsafeRawBufferPointer(rebasing: $0[taken...])) }
    }

    /// Removes bytes that TLS has taken.
    ///
    /// - Returns: The streams whose requests end within these bytes.
    mutating func remove(_ count: Int) -> [Int32] {
        taken += count
        var ended: [Int32] = []
        while endsTaken < ends.count, ends[endsTaken].offset <= taken {
            ended.append(ends[endsTaken].stream)
            endsTaken += 1
        }
        if taken == bytes.count {
            // Hundreds of connections must not each keep what a burst needed.
            bytes.removeAll(keepingCapacity: bytes.count <= Self.kept)
            ends.removeAll(keepingCapacity: bytes.capacity > 0)
            (taken, endsTaken) = (0, 0)
        }
        return ended
    }
}
