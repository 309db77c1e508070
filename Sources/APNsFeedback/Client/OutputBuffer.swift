/// Bytes that TLS has not taken yet, and where in them requests end.
///
/// A request counts as sent when TLS has taken the frame with its END_STREAM: TLS seals bytes in records, and a server can read
/// nothing of a record before its end.
struct OutputBuffer {
    private var bytes: [UInt8] = []
    /// How many at the front of `bytes` are gone.
    private var gone = 0
    /// Where the frames with END_STREAM end, in bytes from the front of `bytes`, in order.
    private var ends: [(place: Int, stream: Int32)] = []
    private var endsGone = 0

    var count: Int { bytes.count - gone }
    var isEmpty: Bool { count == 0 }

    mutating func append(_ frame: UnsafeBufferPointer<UInt8>) {
        unsafe bytes.append(contentsOf: frame)
    }

    /// The frame that was just appended ends this stream's request.
    mutating func markEnd(of stream: Int32) {
        ends.append((bytes.count, stream))
    }

    /// After an incomplete write, the next one must begin with the same bytes: bytes are only added behind them.
    func withBytes<Answer>(_ use: (UnsafeRawBufferPointer) -> Answer) -> Answer {
        unsafe bytes.withUnsafeBytes { unsafe use(UnsafeRawBufferPointer(rebasing: $0[gone...])) }
    }

    /// TLS has taken so many bytes.
    ///
    /// - Returns: The streams whose requests have ended with them.
    mutating func remove(_ count: Int) -> [Int32] {
        gone += count
        var ended: [Int32] = []
        while endsGone < ends.count, ends[endsGone].place <= gone {
            ended.append(ends[endsGone].stream)
            endsGone += 1
        }
        if gone == bytes.count {
            bytes.removeAll(keepingCapacity: true)
            ends.removeAll(keepingCapacity: true)
            (gone, endsGone) = (0, 0)
        }
        return ended
    }
}
