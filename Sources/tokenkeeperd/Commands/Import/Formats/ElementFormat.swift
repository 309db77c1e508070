/// A sequence of XML elements of one name, one on each line or not: what Azure Notification Hubs exports.
///
/// An element that is cut off ends where the next one begins, so that it costs only itself.
struct ElementFormat: ImportFormat {
    private static let marker = Array("<!-- tokenkeeperd: ".utf8)
    private static let commentBegin = Array("<!--".utf8)
    private static let commentEnd = Array("-->".utf8)
    private static let declaration = Array("<?".utf8)

    private let begin: [UInt8]
    private let close: [UInt8]
    private let read: @Sendable (XMLElement, inout ImportRow) -> ImportRecord

    var items: (one: String, many: String) { ("element", "elements") }

    private init(_ name: String, _ read: @escaping @Sendable (XMLElement, inout ImportRow) -> ImportRecord) {
        begin = Array("<\(name)".utf8)
        close = Array("</\(name)>".utf8)
        self.read = read
    }

    /// Registrations: https://learn.microsoft.com/azure/notification-hubs/export-modify-registrations-bulk
    static let registrations = ElementFormat("RegistrationDescription", AzureHub.registration)

    /// What push services have said: https://learn.microsoft.com/rest/api/notificationhubs/get-pns-feedback
    static let feedback = ElementFormat("PnsFeedback", AzureHub.feedback)

    func next(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) -> ImportScan {
        func found(_ record: ImportRecord, to next: Int) -> ImportScan {
            .found(record, end: next, lines: Bytes.newlines(in: bytes, from: start, to: next))
        }
        var place = start
        while place < end, bytes[place].isBlank { place += 1 }
        if Bytes.has(Bytes.byteOrderMark, in: bytes, at: place, to: end) { place += 3 }
        if place > start { return found(.nothing, to: place) }
        if Bytes.has(Self.commentBegin, in: bytes, at: place, to: end) {
            guard let close = Bytes.first(Self.commentEnd, in: bytes, from: place, to: end) else {
                return what == .more ? .needsMore : found(.refused(Refusal("a comment is not closed")), to: end)
            }
            return found(.nothing, to: close + Self.commentEnd.count)
        }
        if Bytes.has(Self.declaration, in: bytes, at: place, to: end) {
            guard let close = Bytes.first(UInt8(ascii: ">"), in: bytes, from: place, to: end) else {
                return what == .more ? .needsMore : found(.refused(Refusal("this is not an element")), to: end)
            }
            return found(.nothing, to: close + 1)
        }
        // The longest of what may be cut in two here.
        if what == .more, end - place < begin.count + 1 { return .needsMore }
        let isElement = isBeginning(bytes, at: place, to: end)
        let following = nextBeginning(in: bytes, from: place + 1, to: end)
        guard isElement else {
            if following == nil, what == .more, end - place < PartEnd.longestRecord / 2 { return .needsMore }
            return found(.refused(Refusal("this is not an element \(name)")), to: following ?? end)
        }
        if let element = XMLElement(bytes, from: place, to: following ?? end) {
            return found(read(element, &row), to: element.end)
        }
        let malformed = Refusal("the element is not closed, or is malformed")
        if let following { return found(.refused(malformed), to: following) }
        if let closed = Bytes.first(close, in: bytes, from: place, to: end) {
            return found(.refused(malformed), to: closed + close.count)
        }
        return what == .more
            ? .needsMore : found(.refused(what == .limit ? PartEnd.tooLong : malformed), to: end)
    }

    private var name: String { String(decoding: begin.dropFirst(), as: UTF8.self) }

    private func isBeginning(_ bytes: [UInt8], at place: Int, to end: Int) -> Bool {
        guard Bytes.has(begin, in: bytes, at: place, to: end), place + begin.count < end else { return false }
        let after = bytes[place + begin.count]
        return after.isBlank || after == UInt8(ascii: ">") || after == UInt8(ascii: "/")
    }

    private func nextBeginning(in bytes: [UInt8], from start: Int, to end: Int) -> Int? {
        // An element that ends before is the usual case: nothing behind its end is looked at.
        var limit = Bytes.first(close, in: bytes, from: start, to: end) ?? end
        // In a file of refused records, an element that is cut off ends before the cause of the next one.
        let cause = Bytes.first(Self.marker, in: bytes, from: start, to: limit)
        limit = cause ?? limit
        var place = start
        while let found = Bytes.first(begin, in: bytes, from: place, to: limit) {
            if isBeginning(bytes, at: found, to: end) { return found }
            place = found + 1
        }
        return cause
    }

    func append(refused record: ArraySlice<UInt8>, line: Int, cause: String, to rejects: inout [UInt8]) {
        // Two hyphens may not be in a comment.
        let words = cause.replacing("--", with: "- -")
        rejects.append(contentsOf: Self.marker)
        rejects.append(contentsOf: "line \(line): \(words) -->\n".utf8)
        rejects.append(contentsOf: record)
        if rejects.last != .newline { rejects.append(.newline) }
    }
}
