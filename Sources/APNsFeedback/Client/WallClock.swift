internal import Glibc
internal import TokenModel

extension Instant {
    /// Now, by this machine's clock.
    static var current: Instant {
        var time = timespec()
        unsafe clock_gettime(CLOCK_REALTIME, &time)
        return Instant(microseconds: Int64(time.tv_sec) * 1_000_000 + Int64(time.tv_nsec) / 1000)
    }
}

extension Duration {
    /// Rounded down; at least 1.
    var wholeMilliseconds: Int32 {
        let whole = components.seconds * 1000 + components.attoseconds / 1_000_000_000_000_000
        return Int32(clamping: max(1, whole))
    }
}
