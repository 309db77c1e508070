/// A partition of the queue: one of the ring's, chosen by the clock when a result is queued; the one for results left for a retry;
/// or the one for those taken out of sealed partitions.
struct Partition: Hashable, Sendable {
    let number: Int

    /// The leaves of the ring; migration 0002 makes them.
    static let ring = (0..<8).map(Partition.init(number:))
    /// Results left for a retry for another try.
    static let retry = Partition(number: 8)
    /// What sealed partitions held and is still to be recorded.
    static let backlog = Partition(number: 9)

    static let all = ring + [retry, backlog]

    /// How many pages one batch takes: some 2,400 410s or 3,300 200s, and never more than half a megabyte.
    static let pagesPerRange = 64

    var table: String {
        switch self {
        case .retry: "tokenkeeper.send_result_retry"
        case .backlog: "tokenkeeper.send_result_backlog"
        default: "tokenkeeper.send_result_\(number)"
        }
    }

    /// The leaf that results are queued in at the moment; the default of `send_result.leaf`.
    static let currentInSQL = inSQL(secondsAgo: 0)

    /// The leaf that results were queued in so long ago.
    static func inSQL(secondsAgo: Int) -> String {
        "((date_part('epoch', clock_timestamp())::bigint - \(secondsAgo) >> 7) & 7)"
    }
}

/// Some rows of a partition: whole pages, or one row.
enum RowRange: Equatable {
    case pages(Range<Int>)
    case row(page: Int, line: Int)

    /// A predicate on `ctid`: a TID range scan, which needs no index (PostgreSQL 14 and newer).
    var predicate: String {
        switch self {
        case .pages(let pages): "ctid >= '(\(pages.lowerBound),0)' AND ctid < '(\(pages.upperBound),0)'"
        case .row(let page, let line): "ctid = '(\(page),\(line))'"
        }
    }

    /// The page whose range is locked while these rows are worked on.
    var firstPage: Int {
        switch self {
        case .pages(let pages): pages.lowerBound
        case .row(let page, _): page
        }
    }
}
