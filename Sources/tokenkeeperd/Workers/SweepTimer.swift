internal import Dispatch
internal import TokenLedger

/// The timer of the sweep: a Dispatch timer on the wall clock. It only says that one may be due; whether it is, the database knows.
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

    /// Fires once, that much later by the wall clock: also when the machine has slept in between.
    func schedule(in duration: Duration) {
        source.schedule(
            wallDeadline: .now() + .milliseconds(Int(clamping: duration.milliseconds)), leeway: .milliseconds(100))
    }
}
