/// When requests came, to see how many there were within any stretch of time. Pure.
public struct Arrivals {
    private let times: [Int64]

    /// - Parameter milliseconds: The instants in milliseconds since one origin, in any order.
    public init(_ milliseconds: some Sequence<Int64>) {
        times = milliseconds.sorted()
    }

    /// The last request before an instant.
    public func last(before instant: Int64) -> Int64? { times.last { $0 < instant } }

    /// The most requests within any stretch of so many milliseconds.
    public func most(within stretch: Int64) -> Int {
        var end = 0
        return times.indices.reduce(0) { most, start in
            while end < times.count, times[end] < times[start] + stretch { end += 1 }
            return max(most, end - start)
        }
    }

    /// The fewest requests within any stretch of so many milliseconds that lies between the first and the last request; nil if there is none.
    public func fewest(within stretch: Int64) -> Int? {
        guard let last = times.last else { return nil }
        var end = 0
        return times.indices.lazy.prefix { times[$0] + stretch <= last }.map { start in
            // After this request, and at the end of the stretch included.
            while end < times.count, times[end] <= times[start] + stretch { end += 1 }
            return end - start - 1
        }.min()
    }
}
