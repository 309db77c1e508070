import Foundation

/// A folder with mode 0700, which is removed at the end.
final class TemporaryDirectory {
    let path = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString)"

    init() throws {
        try FileManager.default.createDirectory(atPath: path, withIntermediateDirectories: true)
        try setMode(0o700)
    }

    deinit { try? FileManager.default.removeItem(atPath: path) }

    func setMode(_ mode: Int) throws {
        try FileManager.default.setAttributes([.posixPermissions: mode], ofItemAtPath: path)
    }

    /// - Returns: The path of the file.
    func write(_ text: String, to name: String) throws -> String {
        try text.write(toFile: "\(path)/\(name)", atomically: false, encoding: .utf8)
        return "\(path)/\(name)"
    }
}
