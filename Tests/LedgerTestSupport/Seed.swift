import Foundation
import TestRun

/// The seeds of random tests: the same in each run, so that a change that breaks a test breaks it at once, and for everybody. `make soak`
/// takes others.
public enum Seed {
    private static let wanted = ProcessInfo.processInfo.environment["TEST_SEED"]

    /// The seed of the test in this file: `TEST_SEED` if that is a number, a random one if it is `random`, and otherwise one that
    /// depends only on the file and on `more`. Prints the command that repeats the run.
    ///
    /// - Parameter more: Distinguishes the runs of one test.
    public static func next(_ more: String = "", file: String = #fileID, function: String = #function) -> UInt64 {
        let seed =
            switch wanted {
            case nil: hash("\(file) \(function) \(more)") % (1 << 32)
            case "random": UInt64.random(in: 0..<1 << 32)
            case let text?: UInt64(text) ?? 0
            }
        // As a regular expression, for the shell.
        let test = String(function.prefix { $0 != "(" }.filter { $0 != "`" }.map { $0 == "'" ? "." : $0 })
        let size = Soak.isWhole ? "TEST_SOAK=whole " : ""
        print("seed \(seed): \(size)TEST_SEED=\(seed) swift test --filter '\(test)'")
        return seed
    }

    /// FNV-1a. Swift's own hashes differ from run to run.
    private static func hash(_ text: String) -> UInt64 {
        text.utf8.reduce(0xCBF2_9CE4_8422_2325) { ($0 ^ UInt64($1)) &* 0x100_0000_01B3 }
    }
}
