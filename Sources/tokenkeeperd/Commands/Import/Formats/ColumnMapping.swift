internal import TokenModel

/// Which column or key of a file each field comes from: `--column token=push_token`.
struct ColumnMapping: Equatable {
    /// The named columns. A field that is not named comes from the column of its own name, if the file has it.
    private(set) var named: [ImportField: String] = [:]

    /// Whether columns that are not named are of no use.
    private var isComplete = false

    init() {}

    /// - Parameter options: As typed: `FIELD=COLUMN`. Without a header, the column is its number, from 1.
    init(_ options: [String]) throws(ImportProblem) {
        for option in options {
            let parts = option.split(separator: "=", maxSplits: 1).map(String.init)
            guard parts.count == 2, let field = ImportField.mappable.first(where: { $0.name == parts[0] }) else {
                let names = ImportField.mappable.map(\.name).joined(separator: ", ")
                throw ImportProblem("--column is \"\(option)\", expected FIELD=COLUMN, where FIELD is one of: \(names)")
            }
            guard named.updateValue(parts[1], forKey: field) == nil else {
                throw ImportProblem("--column names \(parts[0]) twice")
            }
        }
    }

    /// Synapse's table pushers: https://element-hq.github.io/synapse
    static let pushers: ColumnMapping = {
        var mapping = ColumnMapping()
        mapping.named = [
            .token: "pushkey", .app: "app_id", .registeredAt: "ts", .userID: "user_name", .kind: "kind",
            .enabled: "enabled",
        ]
        // Its device_id is a session, which is unique only within a user.
        mapping.isComplete = true
        return mapping
    }()

    /// The field that a column of this name holds.
    func field(of column: String) -> ImportField? {
        named.first { $0.value == column }?.key
            ?? (isComplete
                ? nil
                : ImportField.mappable.first {
                    $0.isFoundByName && named[$0] == nil && $0.name == column.lowercased()
                })
    }

    /// The field of each column of a header.
    func fields(of header: [String]) throws(ImportProblem) -> [ImportField?] {
        let fields = header.map(field(of:))
        for (field, column) in named.sorted(by: { $0.key.rawValue < $1.key.rawValue })
        // The column is younger than Synapse's table.
        where field != .enabled {
            let count = fields.count { $0 == field }
            guard count == 1 else {
                throw ImportProblem(
                    "the header has \(count == 0 ? "no column" : "\(count) columns") \"\(column)\" for \(field.name); it has: \(Self.list(header))"
                )
            }
        }
        let tokens = fields.count { $0 == .token }
        guard tokens == 1 else {
            throw ImportProblem(
                tokens == 0
                    ? "the header has no column \"token\": name it with --column token=NAME, or give --no-header if the first line is a row; it has: \(Self.list(header))"
                    : "the header has \(tokens) columns \"token\"; name one with --column token=NAME")
        }
        return fields
    }

    /// The field of each column, by number.
    func fieldsByNumber() throws(ImportProblem) -> [ImportField?] {
        var fields: [ImportField?] = []
        for (field, column) in named {
            guard let number = Int(column), (1...1000).contains(number) else {
                throw ImportProblem(
                    "--column \(field.name)=\(column): expected the number of a column, because --no-header is given")
            }
            while fields.count < number { fields.append(nil) }
            guard fields[number - 1] == nil else { throw ImportProblem("--column names column \(number) twice") }
            fields[number - 1] = field
        }
        guard named[.token] != nil else {
            throw ImportProblem("--no-header needs the number of the token's column: --column token=1")
        }
        return fields
    }

    private static func list(_ header: [String]) -> String {
        header.prefix(50).map { DeviceToken.cut(in: HistoryText.plain(String($0.prefix(60)))) }.joined(separator: ", ")
    }
}
