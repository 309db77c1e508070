internal import Dispatch
internal import TokenLedger

/// The timer of the sweep: a Dispatch timer on the wall clock. It signals that a sweep may be due; the database decides.
final class SweepTimer {
    private let source: any DispatchSourceTimer

    init(fired: @escaping @Sendable () -> Void) {
        source = DispatchSource.makeTimerSource(queue: DispatchQueue(label: "sweep timer"))
        source.setEventHandler { @Sendable in fired() }
        source.schedule(wallDeadline: .distantFuture)
        source.activate()
    }

    deinit {
        source.cancel()
    }

    /// Fires once, after this duration by the wall clock, even if the machine sleeps in between.
    func schedule(in duration: Duration) {
        source.schedule(
            wallDeadline: .now() + .milliseconds(Int(clamping: duration.milliseconds)), leeway: .milliseconds(100))
    }
}
