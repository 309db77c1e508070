import Foundation
import LedgerTestSupport

/// A certificate for the cluster, so that the daemon can be measured over TLS.
struct Certificate {
    let certificate: String
    let key: String

    init() throws {
        let folder = NSTemporaryDirectory() + "tk-bench-\(UUID().uuidString.prefix(8))"
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(atPath: folder) }
        try TestCluster.run([
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-keyout", "\(folder)/key", "-out", "\(folder)/crt",
        ])
        certificate = try String(contentsOfFile: "\(folder)/crt", encoding: .utf8)
        key = try String(contentsOfFile: "\(folder)/key", encoding: .utf8)
    }
}
