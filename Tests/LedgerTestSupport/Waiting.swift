import Foundation
import TestRun

/// Repeats a check until it holds. Fails after half a minute, in a whole soak after five.
///
/// It blocks its thread, so the test's suite needs the trait `ownThread`.
public func eventually(
    _ what: String, within seconds: Int = Soak.isWhole ? 300 : 30, _ isSo: () throws -> Bool
) throws {
    let clock = ContinuousClock()
    let deadline = clock.now + .seconds(seconds)
    // Check often at first, then less often: the checks and the daemon share the cores.
    var pause: UInt32 = 2_000
    while true {
        if try isSo() { return }
        guard clock.now < deadline, !TestResources.isOver else { throw TestFailure("not within \(seconds) s: \(what)") }
        usleep(pause)
        pause = min(pause * 3 / 2, 40_000)
    }
}
