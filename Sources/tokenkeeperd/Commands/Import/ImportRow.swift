internal import TokenLedger

/// What a column or key of a file may be imported as.
enum ImportField: Int, CaseIterable {
    case token, topic, environment, registeredAt, deviceID, userID, tags, unregistered
    /// The opposite of `unregistered`.
    case active
    /// Of feedback only: the timestamp of the 410, and APNs' reason.
    case timestamp, reason

    /// The name on the command line, which is also the column that is taken if none is named.
    var name: String {
        switch self {
        case .token: "token"
        case .topic: "topic"
        case .environment: "environment"
        case .registeredAt: "registered_at"
        case .deviceID: "device_id"
        case .userID: "user_id"
        case .tags: "tags"
        case .unregistered: "unregistered"
        case .active: "active"
        case .timestamp: "timestamp"
        case .reason: "reason"
        }
    }

    /// Those that the rows of a queue have.
    static func of(_ queue: ImportSource.Queue) -> [ImportField] {
        switch queue {
        case .registration:
            [.token, .topic, .environment, .registeredAt, .deviceID, .userID, .tags, .unregistered, .active]
        case .result: [.token, .topic, .environment, .timestamp, .reason]
        }
    }

    /// Whether it is when the row was true.
    var isTime: Bool { self == .registeredAt || self == .timestamp }

    /// Whether it comes from the column of its own name if none is named. `active` may mean many things.
    var isFoundByName: Bool { self != .active }
}

/// What a column or key is read for: a field, a filter, or both.
struct ColumnUse: Equatable {
    var field: ImportField?
    /// Its place among the filters.
    var filter: Int?
}

/// One record of a file, as text: what a format has read, before any rule. It is used again for each record, so that a record
/// costs no allocation.
struct ImportRow {
    /// The values, one after the other.
    private(set) var bytes: [UInt8] = []
    private var ranges = [Range<Int>?](repeating: nil, count: ImportField.allCases.count)
    /// The values that filters look at.
    private var filtered: [Range<Int>?] = []
    /// The tags, if the format has lists. Otherwise they are one text.
    private(set) var tagList: [Range<Int>]?
    /// Whether the record has a reason, and it is empty: an accepted push in a sender's log, for example.
    private(set) var hasEmptyReason = false
    /// A field that the record has twice, with a value each time.
    private(set) var repeated: ImportField?
    /// Why the record has no token, if it has no place for one.
    var absence: String?
    /// Of all records so far.
    var unread = UnreadColumns()
    private var began = 0

    mutating func clear() {
        bytes.removeAll(keepingCapacity: true)
        for index in ranges.indices { ranges[index] = nil }
        for index in filtered.indices { filtered[index] = nil }
        tagList = nil
        hasEmptyReason = false
        repeated = nil
        absence = nil
    }

    /// Where the value is in `bytes`; nil if it is absent or empty.
    subscript(field: ImportField) -> Range<Int>? { ranges[field.rawValue] }

    subscript(filter index: Int) -> Range<Int>? { index < filtered.count ? filtered[index] : nil }

    /// A value is written between `begin` and one of the functions that end it.
    mutating func begin() { began = bytes.count }

    mutating func append(_ byte: UInt8) { bytes.append(byte) }

    mutating func append(_ source: [UInt8], _ range: Range<Int>) { bytes.append(contentsOf: source[range]) }

    /// Ends the value. An empty value counts as absent.
    mutating func end(_ use: ColumnUse) {
        let range = began < bytes.count ? began..<bytes.count : nil
        if let field = use.field, let range {
            if ranges[field.rawValue] != nil || field == .tags && tagList != nil { repeated = field }
            ranges[field.rawValue] = range
        }
        if use.field == .reason, range == nil { hasEmptyReason = true }
        if let filter = use.filter {
            while filtered.count <= filter { filtered.append(nil) }
            filtered[filter] = range
        }
    }

    /// Ends a value that is one of the tags.
    mutating func endTag() { tagList = (tagList ?? []) + [began..<bytes.count] }

    /// There is a list of tags, even if it stays empty.
    mutating func beginTagList() {
        if tagList != nil || self[.tags] != nil { repeated = .tags }
        tagList = []
    }

    /// What was written last, as text. For words such as a key, not for every value.
    func word(_ range: Range<Int>) -> String { String(decoding: bytes[range], as: UTF8.self) }
}
