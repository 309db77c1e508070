import Foundation
import Testing

@testable import TokenModel

@Suite struct `A file that cannot be read` {
    private let folder = NSTemporaryDirectory() + UUID().uuidString

    @Test func `says why`() throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(atPath: folder) }
        let fifo = folder + "/fifo"
        #expect(mkfifo(fifo, 0o600) == 0)
        let large = folder + "/large"
        try Data(count: (1 << 20) + 1).write(to: URL(fileURLWithPath: large))
        for (path, reason) in [
            (folder + "/none", "No such file or directory"), (folder, "Is a directory"), (large, "larger than 1 MiB"),
            (large + "/below", "Not a directory"), (fifo, "not a regular file"), ("/dev/zero", "not a regular file"),
        ] {
            let error = #expect(throws: UnreadableFile.self) { try SecretBytes(contentsOf: path) }
            #expect(error?.description == reason)
        }
        #expect(UnreadableFile(error: EACCES).description == "Permission denied for user \(geteuid())")
    }
}
