/// What a clock on the wall shows, by the offsets from UTC that were in force. Pure.
struct LocalTime: Equatable {
    /// In force from an instant on.
    struct Offset: Equatable {
        /// In seconds since 1970.
        let since: Int64
        /// In seconds east of UTC.
        let seconds: Int64
    }

    /// The earliest first, which holds for all time before, too.
    private let offsets: [Offset]

    static let utc = LocalTime(offset: 0)

    init(offset: Int64) { offsets = [Offset(since: .min, seconds: offset)] }

    /// - Parameter offsets: The earliest first, at least one.
    init(_ offsets: [Offset]) { self.offsets = offsets }

    /// The UTC of a local time, both in seconds since 1970. An hour that a clock shows twice is the later one, and one that it skips is
    /// read as before the change: too late an instant revives a token for one push, too early a one withholds a live device.
    func utc(_ local: Int64) -> Int64 {
        let offset = offsets.last { $0.since == .min || local - $0.seconds >= $0.since } ?? offsets[0]
        return local - offset.seconds
    }
}
