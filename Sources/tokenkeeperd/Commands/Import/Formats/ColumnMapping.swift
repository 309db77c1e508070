internal import TokenLedger
internal import TokenModel

/// Rows to import: those whose column has one of these values. An empty one means an empty or absent value.
struct ImportFilter: Equatable {
    let column: String
    fileprivate(set) var values: [[UInt8]]
}

/// Which column or key of a file each field and filter comes from: `--column token=push_token`, `--filter platform=ios`.
struct ColumnMapping: Equatable {
    /// What the rows may have.
    let fields: [ImportField]
    /// The named columns. A field that is not named comes from the column of its own name, if the file has it; of a field named
    /// without a column, nothing is read.
    private(set) var named: [ImportField: String] = [:]
    private(set) var filters: [ImportFilter] = []

    /// - Parameters:
    ///   - columns: As typed: `FIELD=COLUMN`. Without a header, the column is its number, from 1.
    ///   - filters: As typed: `COLUMN=VALUE`.
    init(_ columns: [String], filters: [String] = [], of queue: ImportSource.Queue) throws(ImportProblem) {
        fields = ImportField.of(queue)
        for option in columns {
            let parts = Self.parts(option)
            guard parts.count == 2, let field = fields.first(where: { $0.name == parts[0] }) else {
                let names = fields.map(\.name).joined(separator: ", ")
                throw ImportProblem("--column is \"\(option)\", expected FIELD=COLUMN, where FIELD is one of: \(names)")
            }
            if let other = named.first(where: { $0.value == parts[1] && !parts[1].isEmpty }), other.key != field {
                throw ImportProblem("--column names \(parts[1]) for \(other.key.name) and \(field.name)")
            }
            guard named.updateValue(parts[1], forKey: field) == nil else {
                throw ImportProblem("--column names \(parts[0]) twice")
            }
        }
        for option in filters {
            let parts = Self.parts(option)
            guard parts.count == 2, !parts[0].isEmpty else {
                throw ImportProblem("--filter is \"\(option)\", expected COLUMN=VALUE")
            }
            if let index = self.filters.firstIndex(where: { $0.column == parts[0] }) {
                self.filters[index].values.append(Array(parts[1].utf8))
            } else {
                self.filters.append(ImportFilter(column: parts[0], values: [Array(parts[1].utf8)]))
            }
        }
    }

    private static func parts(_ option: String) -> [String] {
        option.split(separator: "=", maxSplits: 1, omittingEmptySubsequences: false).map(String.init)
    }

    /// The columns that may be read, each with its use. One that nobody has named may be in upper case.
    var uses: [(column: String, use: ColumnUse, isNamed: Bool)] {
        var uses: [(column: String, use: ColumnUse, isNamed: Bool)] = fields.compactMap { field in
            let isOfOther = named[field] == nil && named.values.contains(field.name)
            let column = named[field] ?? (field.isFoundByName && !isOfOther ? field.name : "")
            return column.isEmpty ? nil : (column: column, use: ColumnUse(field: field), isNamed: named[field] != nil)
        }
        for (index, filter) in filters.enumerated() {
            if let same = uses.firstIndex(where: { $0.column == filter.column }) {
                uses[same].use.filter = index
            } else {
                uses.append((filter.column, ColumnUse(filter: index), true))
            }
        }
        return uses
    }

    /// The use of a column of this name, without blanks around it.
    private func use(of column: String) -> ColumnUse? {
        if column.isEmpty { return nil }
        let field =
            named.first { Self.trimmed($0.value) == column }?.key
            ?? fields.first { $0.isFoundByName && named[$0] == nil && $0.name == column.lowercased() }
        let filter = filters.firstIndex { Self.trimmed($0.column) == column }
        return field == nil && filter == nil ? nil : ColumnUse(field: field, filter: filter)
    }

    private static func trimmed(_ name: String) -> String {
        let bytes = Array(name.utf8)
        return String(decoding: bytes[Bytes.trimmed(bytes, bytes.indices)], as: UTF8.self)
    }

    /// The use of each column of a header.
    func uses(of header: [String]) throws(ImportProblem) -> [ColumnUse?] {
        let uses = header.map(use(of:))
        for (field, column) in named.sorted(by: { $0.key.rawValue < $1.key.rawValue }) where !column.isEmpty {
            try Self.check(uses.count { $0?.field == field }, column, field.name, header)
        }
        for (index, filter) in filters.enumerated() {
            try Self.check(uses.count { $0?.filter == index }, filter.column, "--filter", header)
        }
        if fields.contains(.timestamp), header.contains("status"), !filters.contains(where: { $0.column == "status" }) {
            throw ImportProblem(
                "the header has a column \"status\", so the rows may be responses of all kinds: take those that are feedback, as in --filter status=410"
            )
        }
        for field in fields {
            let columns = header.indices.filter { uses[$0]?.field == field }.map { header[$0] }
            guard columns.count > 1 else { continue }
            throw ImportProblem(
                "the header has \(columns.count) columns for \(field.name) (\(Self.list(columns))): rename one, or name one with --column \(field.name)=NAME"
            )
        }
        guard uses.contains(where: { $0?.field == .token }) else {
            throw ImportProblem(
                "the header has no column \"token\": name it with --column token=NAME, or give --no-header if the first line is a row; it has: \(Self.list(header))"
            )
        }
        return uses
    }

    private static func check(
        _ count: Int, _ column: String, _ purpose: String, _ header: [String]
    ) throws(ImportProblem) {
        guard count == 1 else {
            throw ImportProblem(
                "the header has \(count == 0 ? "no column" : "\(count) columns") \"\(column)\" for \(purpose); it has: \(Self.list(header))"
            )
        }
    }

    /// The use of each column, by number.
    func usesByNumber() throws(ImportProblem) -> [ColumnUse?] {
        var uses: [ColumnUse?] = []
        func place(_ column: String, _ option: String) throws(ImportProblem) -> Int {
            guard let number = Int(column), (1...1000).contains(number) else {
                throw ImportProblem("\(option): expected the number of a column, because --no-header is given")
            }
            while uses.count < number { uses.append(nil) }
            return number - 1
        }
        for (field, column) in named where !column.isEmpty {
            uses[try place(column, "--column \(field.name)=\(column)")] = ColumnUse(field: field)
        }
        for (index, filter) in filters.enumerated() {
            let place = try place(filter.column, "--filter \(filter.column)")
            uses[place] = ColumnUse(field: uses[place]?.field, filter: index)
        }
        guard uses.contains(where: { $0?.field == .token }) else {
            throw ImportProblem("--no-header needs the number of the token's column: --column token=1")
        }
        return uses
    }

    private static func list(_ header: [String]) -> String {
        header.prefix(50).map { DeviceToken.cut(in: HistoryText.plain(String($0.prefix(60)))) }.joined(separator: ", ")
    }
}
