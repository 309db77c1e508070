import FakeAPNs
import Foundation
import Synchronization

/// A line per request with tabs between the fields, in the order of the decisions. Written in blocks of 64 KiB, and at the end.
final class RequestLog: Sendable {
    private let file: FileHandle
    private let lines = Mutex<[UInt8]>([])

    init(appendingTo path: String) throws {
        if !FileManager.default.fileExists(atPath: path) {
            _ = FileManager.default.createFile(atPath: path, contents: nil)
        }
        file = try FileHandle(forWritingTo: URL(fileURLWithPath: path))
        try file.seekToEnd()
    }

    func append(_ exchange: FakeExchange) {
        let request = exchange.request
        let outcome = exchange.outcome
        lines.withLock { lines in
            lines += request.apnsID.utf8
            for field in [
                request.token ?? "", request.topic ?? "", String(outcome.status), outcome.reason,
                String(request.connection), String(request.time),
            ] {
                lines.append(UInt8(ascii: "\t"))
                lines += field.utf8
            }
            lines.append(UInt8(ascii: "\n"))
            if lines.count >= 65_536 { write(&lines) }
        }
    }

    func flush() {
        lines.withLock { write(&$0) }
    }

    private func write(_ lines: inout [UInt8]) {
        try? file.write(contentsOf: lines)
        lines.removeAll(keepingCapacity: true)
    }
}
