internal import Dispatch
internal import Glibc

/// The process's signals, as Dispatch sources.
final class Signals {
    private static let handled = [SIGTERM, SIGINT, SIGUSR1, SIGHUP]
    private var sources: [any DispatchSourceSignal] = []
    private let queue = DispatchQueue(label: "signals")

    /// The first statement of the process: a signal that arrives before its source exists would kill it. All threads inherit this.
    static func block() {
        change(SIG_BLOCK)
        _ = signal(SIGPIPE, SIG_IGN)
    }

    /// Restores the default action, for commands that have nothing to finish.
    static func unblock() {
        change(SIG_UNBLOCK)
    }

    private static func change(_ how: CInt) {
        var set = sigset_t()
        unsafe sigemptyset(&set)
        for number in handled { unsafe sigaddset(&set, number) }
        _ = unsafe pthread_sigmask(how, &set, nil)
    }

    /// Signals that arrive at once may count as one: a signal means "at least once". However many arrive while `act` runs, it
    /// runs once more. A slow action, such as a reload, does not delay other signals.
    func on(_ number: Int32, _ act: @escaping @Sendable () -> Void) {
        let work = CoalescedWork(on: DispatchQueue(label: "signal \(number)"), act)
        let source = DispatchSource.makeSignalSource(signal: number, queue: queue)
        source.setEventHandler(handler: DispatchWorkItem { work.request() })
        source.activate()
        sources.append(source)
    }
}
