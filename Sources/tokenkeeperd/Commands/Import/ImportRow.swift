/// What a column or key of a file may be imported as.
enum ImportField: Int, CaseIterable {
    case token, topic, environment, registeredAt, deviceID, userID, tags, unregistered
    /// The opposite of `unregistered`.
    case active
    /// Only of Synapse's pushers.
    case app, kind, enabled

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
        case .app: "app_id"
        case .kind: "kind"
        case .enabled: "enabled"
        }
    }

    /// Those that `--column` can map.
    static let mappable: [ImportField] = [
        .token, .topic, .environment, .registeredAt, .deviceID, .userID, .tags, .unregistered, .active,
    ]

    /// Whether it comes from the column of its own name if none is named. `active` may mean many things.
    var isFoundByName: Bool { self != .active }
}

/// One record of a file, as text: what a format has read, before any rule. It is used again for each record, so that a record
/// costs no allocation.
struct ImportRow {
    /// The values, one after the other.
    private(set) var bytes: [UInt8] = []
    private var ranges = [Range<Int>?](repeating: nil, count: ImportField.allCases.count)
    /// The tags, if the format has lists. Otherwise they are one text.
    private(set) var tagList: [Range<Int>]?
    private var began = 0

    mutating func clear() {
        bytes.removeAll(keepingCapacity: true)
        for index in ranges.indices { ranges[index] = nil }
        tagList = nil
    }

    /// Where the value is in `bytes`; nil if it is absent or empty.
    subscript(field: ImportField) -> Range<Int>? { ranges[field.rawValue] }

    /// A value is written between `begin` and one of the functions that end it.
    mutating func begin() { began = bytes.count }

    mutating func append(_ byte: UInt8) { bytes.append(byte) }

    mutating func append(_ source: [UInt8], _ range: Range<Int>) { bytes.append(contentsOf: source[range]) }

    /// Ends the value. An empty value counts as absent.
    mutating func end(_ field: ImportField) {
        ranges[field.rawValue] = began < bytes.count ? began..<bytes.count : nil
    }

    /// Writes a whole value.
    mutating func set(_ field: ImportField, _ value: some Sequence<UInt8>) {
        begin()
        bytes.append(contentsOf: value)
        end(field)
    }

    /// Writes one of the tags.
    mutating func add(tag: some Sequence<UInt8>) {
        begin()
        bytes.append(contentsOf: tag)
        endTag()
    }

    /// Ends a value that is one of the tags.
    mutating func endTag() { tagList = (tagList ?? []) + [began..<bytes.count] }

    /// There is a list of tags, even if it stays empty.
    mutating func beginTagList() { tagList = [] }

    /// What was written last, as text. For words such as a key, not for every value.
    func word(_ range: Range<Int>) -> String { String(decoding: bytes[range], as: UTF8.self) }
}
