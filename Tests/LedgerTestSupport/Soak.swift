import Foundation

/// The size of the tests that try their luck many times.
///
/// `make test` runs them small, so that it takes minutes. Continuous integration runs them whole: `TEST_SOAK=whole`.
public enum Soak {
    public static let isWhole = ProcessInfo.processInfo.environment["TEST_SOAK"] == "whole"

    public static func size(_ small: Int, whole: Int) -> Int { isWhole ? whole : small }
}
