internal import TokenLedger

/// Topics that are in this database, and that the map leads to another one: somebody writes to the wrong database.
enum StrayTopics {
    /// - Parameter values: With map.file and map.database.
    /// - Returns: In words; nil if there are none, or no map.
    static func warning(
        _ values: [String: Configuration.Resolved], on connection: inout Connection
    ) throws(DatabaseError) -> String? {
        guard let file = values["map.file"]?.value, let name = values["map.database"]?.value else { return nil }
        let map: TopicMap
        do { map = try TopicMap(contentsOf: file) } catch { return error.problems.first }
        guard map.databases[name] != nil else { return "map.database is \(name), which is not in \(file)" }
        return words(try KnownTopics.withTokens(on: &connection), in: name, map)
    }

    static func words(_ topics: [String], in name: String, _ map: TopicMap) -> String? {
        let strays = topics.filter { !map.holders(of: $0).contains(name) }
        if strays.isEmpty { return nil }
        let few = strays.prefix(5).map { "\($0) (\(map.holders(of: $0).sorted().joined(separator: ", ")))" }
        let more = strays.count > few.count ? " and \(strays.count - few.count) more" : ""
        return "the map leads to other databases for topics that are in \(name): \(few.joined(separator: ", "))\(more)"
    }
}
