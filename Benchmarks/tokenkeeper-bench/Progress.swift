import Foundation

/// Prints progress on standard error.
enum Progress {
    private static let start = ContinuousClock.now

    static func say(_ text: String) {
        let seconds = Int(start.duration(to: .now) / .seconds(1))
        FileHandle.standardError.write(Data("bench: \(seconds) s: \(text)\n".utf8))
    }
}
