internal import TokenModel

/// How far an import has come: `registration_source.position`. Pure.
struct ImportPosition: Equatable {
    /// Which file it is, and how it is read: an import continues only if both are the same.
    var identity: String
    /// Where the next record begins, in bytes.
    var offset: Int64 = 0
    /// The lines before, or the elements of an array.
    var lines: Int64 = 0
    /// The records before: rows, refused and skipped ones.
    var records: Int64 = 0
    var skipped: Int64 = 0
    /// How long the file of the refused records is, in bytes.
    var rejects: Int64 = 0

    init(identity: String) { self.identity = identity }

    /// `file=… offset=… …`
    var text: String {
        let numbers = Self.numbers.map { "\($0.name)=\(self[keyPath: $0.path])" }
        return (["file=\(identity)"] + numbers).joined(separator: " ")
    }

    /// - Returns: Nil if it is of another release.
    init?(_ text: String) {
        var values: [String: String] = [:]
        for part in text.split(separator: " ") {
            let pair = part.split(separator: "=", maxSplits: 1).map(String.init)
            guard pair.count == 2 else { return nil }
            values[pair[0]] = pair[1]
        }
        guard let identity = values["file"] else { return nil }
        self.identity = identity
        for number in Self.numbers {
            guard let value = values[number.name].flatMap({ Int64($0) }), value >= 0 else { return nil }
            self[keyPath: number.path] = value
        }
    }

    private static var numbers: [(name: String, path: WritableKeyPath<ImportPosition, Int64>)] {
        [
            ("offset", \.offset), ("lines", \.lines), ("records", \.records), ("skipped", \.skipped),
            ("rejects", \.rejects),
        ]
    }
}
