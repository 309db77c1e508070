internal import COpenSSL
internal import FoundationEssentials
internal import TokenLedger

/// Which database has a topic: the map of several complete databases, a file of JSON that clients in other languages read, too.
///
/// A topic that the map does not name belongs to one of 1,024 buckets, and each bucket to a database, so that a bucket can move alone.
struct TopicMap: Sendable {
    static let buckets = 1024

    /// Connection strings by name. Without passwords: other programs show them.
    let databases: [String: String]
    /// The database of each topic that does not follow its bucket.
    let topics: [String: String]
    /// The topics whose devices are spread over the buckets.
    let splitByDevice: Set<String>
    /// The database of each bucket.
    let owners: [String]

    var names: [String] { databases.keys.sorted() }

    enum Leads: Equatable, Sendable {
        case to(String)
        /// The topic is split, and no device was named.
        case byDevice
    }

    /// The database of a topic, or of a device of a topic that is split.
    func database(of topic: String, device: String? = nil) -> Leads {
        if let name = topics[topic] { return .to(name) }
        guard splitByDevice.contains(topic) else { return .to(owners[Self.bucket(of: topic)]) }
        guard let device, !device.isEmpty else { return .byDevice }
        return .to(owners[Self.bucket(of: topic, device: device)])
    }

    /// The databases in which tokens of a topic may be.
    func holders(of topic: String) -> Set<String> {
        switch database(of: topic) {
        case .to(let name): [name]
        case .byDevice: Set(owners)
        }
    }

    /// The bucket of a topic, or of a device of a topic that is split: the last ten bits of the first two bytes of SHA-256.
    ///
    /// Upper and lower case of A to Z make no difference in a device: a UUID is the same in both.
    static func bucket(of topic: String, device: String? = nil) -> Int {
        var key = Array(topic.utf8)
        if let device {
            key.append(UInt8(ascii: "\n"))
            key += device.utf8.map { (UInt8(ascii: "A")...UInt8(ascii: "Z")).contains($0) ? $0 + 32 : $0 }
        }
        var digest = [UInt8](repeating: 0, count: Int(SHA256_DIGEST_LENGTH))
        _ = unsafe SHA256(key, key.count, &digest)
        return (Int(digest[0]) << 8 | Int(digest[1])) % buckets
    }
}

extension TopicMap {
    private struct File: Decodable {
        var databases: [String: String] = [:]
        var topics: [String: String] = [:]
        var splitByDevice: [String] = []
        var buckets: [String: String] = [:]
        var unknown: [String] = []

        private struct Key: CodingKey {
            let stringValue: String
            var intValue: Int? { nil }
            init(stringValue: String) { self.stringValue = stringValue }
            init?(intValue: Int) { nil }
        }

        init(from decoder: any Decoder) throws {
            let object = try decoder.container(keyedBy: Key.self)
            for key in object.allKeys {
                switch key.stringValue {
                case "databases": databases = try object.decode([String: String].self, forKey: key)
                case "topics": topics = try object.decode([String: String].self, forKey: key)
                case "split_by_device": splitByDevice = try object.decode([String].self, forKey: key)
                case "buckets": buckets = try object.decode([String: String].self, forKey: key)
                default: unknown.append(key.stringValue)
                }
            }
        }
    }

    /// - Parameter bytes: Of the file.
    /// - Throws: All that is wrong with it.
    init(_ bytes: some Sequence<UInt8>) throws(ConfigurationError) {
        let file: File
        do {
            file = try JSONDecoder().decode(File.self, from: Data(bytes))
        } catch DecodingError.typeMismatch(_, let context) {
            let place = context.codingPath.map(\.stringValue).joined(separator: ".")
            throw ConfigurationError(["\(place.isEmpty ? "the map" : place) is of another type than expected"])
        } catch {
            throw ConfigurationError(["no JSON object with databases and buckets"])
        }
        databases = file.databases
        topics = file.topics
        splitByDevice = Set(file.splitByDevice)
        var problems = file.unknown.sorted().map { "\(ConfigurationProblems.quoted($0)) is no part of a map" }
        problems += Self.faults(of: file.databases)
        for (topic, name) in file.topics.sorted(by: { $0.key < $1.key }) {
            if databases[name] == nil {
                problems.append("topic \(topic) is in \(name), which is no database of the map")
            }
            if splitByDevice.contains(topic) { problems.append("topic \(topic) is split by device, and is in \(name)") }
        }
        let (owners, faults) = Self.owners(file.buckets, of: databases)
        problems += faults
        if !problems.isEmpty { throw ConfigurationError(problems) }
        self.owners = owners
    }

    /// The database of each bucket, and what is wrong.
    private static func owners(
        _ buckets: [String: String], of databases: [String: String]
    ) -> ([String], problems: [String]) {
        var problems: [String] = []
        var owners = [String?](repeating: nil, count: TopicMap.buckets)
        for (name, list) in buckets.sorted(by: { $0.key < $1.key }) {
            if databases[name] == nil { problems.append("buckets: \(name) is no database of the map") }
            guard let ranges = ranges(list) else {
                problems.append(
                    "buckets of \(name): expected numbers and ranges from 0 to \(TopicMap.buckets - 1), such as 0-511,600"
                )
                continue
            }
            for bucket in ranges.joined() {
                if let other = owners[bucket], !problems.contains(where: { $0.hasPrefix("bucket ") }) {
                    problems.append("bucket \(bucket) is in \(other) and in \(name)")
                }
                owners[bucket] = name
            }
        }
        if let free = owners.firstIndex(of: nil) {
            problems.append("bucket \(free) is in no database")
        }
        return (owners.compactMap(\.self), problems)
    }

    private static func faults(of databases: [String: String]) -> [String] {
        var problems = databases.isEmpty ? ["the map has no databases"] : []
        for (name, address) in databases.sorted(by: { $0.key < $1.key }) {
            if name.wholeMatch(of: #/[A-Za-z0-9_-]{1,60}/#) == nil {
                problems.append(
                    "\(ConfigurationProblems.quoted(name)) is no name of a database: up to 60 letters, digits, - and _")
            }
            do {
                if try DatabaseAddress(address).password != nil {
                    problems.append("database \(name): a map has no passwords: use passfile=, or ~/.pgpass")
                }
            } catch {
                problems.append("database \(name): \(error)")
            }
        }
        return problems
    }

    /// Buckets as `0-511,600`. Nil for anything else.
    private static func ranges(_ text: String) -> [ClosedRange<Int>]? {
        if text.isEmpty { return [] }
        var ranges: [ClosedRange<Int>] = []
        for part in text.split(separator: ",", omittingEmptySubsequences: false) {
            let ends = part.split(separator: "-", omittingEmptySubsequences: false).map { Int($0) }
            guard ends.count <= 2, let first = ends[0], let last = ends[ends.count - 1], first <= last,
                0..<buckets ~= first, 0..<buckets ~= last
            else { return nil }
            ranges.append(first...last)
        }
        return ranges
    }

    /// The map that the configuration names.
    init(of configuration: Configuration) throws(ConfigurationError) {
        try self.init(contentsOf: try Self.file(of: configuration))
    }

    /// Where the map is.
    static func file(of configuration: Configuration) throws(ConfigurationError) -> String {
        guard let file = configuration.values["map.file"]?.value else {
            throw ConfigurationError(["no map of databases: set map.file, or TOKENKEEPER_MAP_FILE"])
        }
        return file
    }

    /// Reads the file.
    ///
    /// - Throws: All that is wrong with it, each with the file's name.
    init(contentsOf path: String) throws(ConfigurationError) {
        let data: Data
        do { data = try Data(contentsOf: URL(filePath: path)) } catch {
            throw ConfigurationError(["map.file: \(path) cannot be read"])
        }
        do { try self.init(data) } catch {
            throw ConfigurationError(error.problems.map { "\(path): \($0)" })
        }
    }
}
