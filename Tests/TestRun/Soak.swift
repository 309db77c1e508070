import Foundation

/// The size of the randomized tests.
///
/// `make test` runs them small, so that it takes minutes. `make soak` runs them in full: `TEST_SOAK=whole`.
public enum Soak {
    public static let isWhole = ProcessInfo.processInfo.environment["TEST_SOAK"] == "whole"

    public static func size(_ small: Int, whole: Int) -> Int { isWhole ? whole : small }
}
