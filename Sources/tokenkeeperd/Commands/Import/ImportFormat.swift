/// Why a record is refused.
struct Refusal: Equatable {
    /// What the summary counts, without anything of the record.
    let kind: String
    /// The cause. Never more of a token than its first 8 characters.
    let text: String

    /// - Parameter detail: What was found in this record.
    init(_ kind: String, _ detail: String? = nil) {
        self.init(kind: kind, text: detail.map { "\(kind): \($0)" } ?? kind)
    }

    init(kind: String, text: String) {
        self.kind = kind
        self.text = text
    }
}

/// A step through a file.
enum ImportScan: Equatable {
    /// The record does not end in these bytes.
    case needsMore
    /// Nothing follows: the end of a document.
    case ended
    /// A record, or what comes between records.
    ///
    /// - end: Where the next one begins.
    /// - lines: How many lines it takes.
    case found(ImportRecord, end: Int, lines: Int)
}

/// What comes after a part of a file.
enum PartEnd {
    /// More of the file.
    case more
    /// More of the file, but no record is that long.
    case limit
    /// Nothing.
    case file

    /// The most that a record may have, in bytes. A quote that is never closed would otherwise take the rest of the file.
    static let longestRecord = 1 << 20

    static let tooLong = Refusal("the record is longer than 1 MiB; only its beginning is kept")
}

/// What a format has found.
enum ImportRecord: Equatable {
    /// The row has its values.
    case row
    /// A header, an empty line, or the cause in a file of refused records.
    case nothing
    /// A record that is not meant for this import, such as a registration of another platform.
    case skipped(String)
    case refused(Refusal)
}

/// A file or an option does not fit: nothing can be imported.
struct ImportProblem: Error, CustomStringConvertible {
    let description: String

    init(_ description: String) { self.description = description }
}

/// Finds the records of a file, one after the other, and reads their values. Pure.
protocol ImportFormat {
    /// Finds the next record.
    ///
    /// - Parameters:
    ///   - bytes: A part of the file.
    ///   - start: Where the record begins. Not the end, unless the file ends here.
    ///   - end: Where the part ends.
    ///   - what: What comes after the part.
    ///   - row: Gets the values. It is empty.
    /// - Throws: If the file cannot be of this format at all.
    mutating func next(
        in bytes: [UInt8], from start: Int, to end: Int, then what: PartEnd, into row: inout ImportRow
    ) throws(ImportProblem) -> ImportScan

    /// Whether the beginning of the file must be read before anything else, even if an earlier run has read it: a header, for example.
    var needsBeginning: Bool { get }

    /// What a file of refused records begins with.
    var rejectsBegin: [UInt8] { get }

    /// Writes a refused record and its cause so that the record can be fixed and imported again.
    ///
    /// - Parameters:
    ///   - record: Its bytes, as in the file.
    ///   - line: The number of its first line, from 1.
    func append(refused record: ArraySlice<UInt8>, line: Int, cause: String, to rejects: inout [UInt8])

    /// What the progress and the summary count, in the singular and the plural.
    var items: (one: String, many: String) { get }

    /// Why the file cannot end here; nil if it can.
    var faultAtEnd: String? { get }

    /// Whether it is known that no record has this field.
    func lacks(_ field: ImportField) -> Bool

    /// Why a file with this beginning is of another format; nil if it may be of this one.
    ///
    /// - Parameter beginning: The first line at least, or the whole file.
    func fault(of beginning: ArraySlice<UInt8>) -> String?
}

extension ImportFormat {
    var needsBeginning: Bool { false }
    var rejectsBegin: [UInt8] { [] }
    var items: (one: String, many: String) { ("line", "lines") }
    var faultAtEnd: String? { nil }

    func lacks(_ field: ImportField) -> Bool { false }
    func fault(of beginning: ArraySlice<UInt8>) -> String? { nil }
}
