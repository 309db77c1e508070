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

    /// A page of the range that is locked while these rows are taken.
    var firstPage: Int {
        switch self {
        case .pages(let pages): pages.lowerBound
        case .row(let page, _): page
        }
    }
}
