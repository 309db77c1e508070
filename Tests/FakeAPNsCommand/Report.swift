import FakeAPNs
import Foundation

/// The content of the file that `--report` writes.
struct Report: Encodable {
    var requests: Int
    /// How many of these were refused: the client was told that they were not processed.
    var refused: Int
    /// By status and reason, e.g. `410 Unregistered`.
    var outcomes: [String: Int]
    var connections: Int
    var mostStreams: Int
    var mostStreamsOfOneConnection: Int
    var faults: [String]

    init(_ records: FakeRecords) {
        requests = records.requests
        refused = records.refused
        outcomes = Dictionary(uniqueKeysWithValues: records.outcomes.map { ($0.description, $1) })
        connections = records.connections
        mostStreams = records.mostStreams
        mostStreamsOfOneConnection = records.mostStreamsOfOneConnection
        faults = records.faults
    }

    func write(to file: String) throws {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.prettyPrinted, .sortedKeys, .withoutEscapingSlashes]
        try (encoder.encode(self) + Data("\n".utf8)).write(to: URL(fileURLWithPath: file), options: .atomic)
    }
}
