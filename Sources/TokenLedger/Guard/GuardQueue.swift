internal import Dispatch

/// Lets the drains of one process come to the mass-failure guard one after the other.
///
/// A topic's guard is locked from when the suspects of a batch are judged until that is committed. Who waits for this in PostgreSQL gives up
/// after the lock timeout, and its suspects are written once more, aside.
public final class GuardQueue: Sendable {
    private let place = DispatchSemaphore(value: 1)

    /// Far longer than a batch takes, far shorter than it takes to be thought dead.
    private static let patience = DispatchTimeInterval.seconds(5)

    public init() {}

    /// Waits for its turn.
    ///
    /// - Returns: False when that took too long; then it is for PostgreSQL to say who waits.
    func enter() -> Bool { place.wait(timeout: .now() + Self.patience) == .success }

    func leave() { place.signal() }
}
