internal import Dispatch
internal import FoundationEssentials
internal import Glibc
internal import Synchronization
internal import TokenLedger

/// Tells the service manager how the daemon is: READY, STATUS, RELOADING, STOPPING, and the watchdog.
///
/// The watchdog is fed by a timer, but only while every worker has kept its promise to be heard of: a worker that hangs ends it.
final class ServiceNotifier: Sendable {
    private struct State {
        var serviceState = ServiceState()
        /// What must get through and has not yet, a datagram each. Nothing where nobody listens.
        var unsent: [[String]] = []
        /// The status told last, and when.
        var told = ""
        var toldAt = ContinuousClock.now
    }

    private let state = Mutex(State())
    private let socket: NotifySocket?
    /// Somebody wants to listen where nothing can be sent to.
    let cannotBeHeard: Bool
    private let watchdog: Duration?

    /// Nobody reads more than a line a second.
    private static let statusPause: Duration = .seconds(1)

    /// Applying migrations may take long: systemd shall not take that for a failed start. Said again while it lasts.
    private static let longerStart = "EXTEND_TIMEOUT_USEC=60000000"

    /// - Parameter environment: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are looked at, as sd_watchdog_enabled(3) does.
    init(environment: [String: String]) {
        socket = NotifySocket(environment["NOTIFY_SOCKET"])
        cannotBeHeard = socket == nil && environment["NOTIFY_SOCKET"].map { !$0.isEmpty } ?? false
        let isForUs = environment["WATCHDOG_PID"].map { $0 == "\(getpid())" } ?? true
        let interval = environment["WATCHDOG_USEC"].flatMap { Int64($0) }.flatMap { $0 > 0 ? $0 : nil }
        watchdog = socket != nil && isForUs ? interval.map { .microseconds($0) } : nil
    }

    /// Feeds the watchdog, and tells what has not been told for the pause, as long as the answer is kept.
    func timer() -> (any DispatchSourceTimer)? {
        if socket == nil { return nil }
        let timer = DispatchSource.makeTimerSource(queue: DispatchQueue(label: "service report"))
        let every = min((watchdog ?? .seconds(20)) / 4, .seconds(5))
        timer.setEventHandler { @Sendable in self.tick() }
        timer.schedule(
            deadline: .now(), repeating: .nanoseconds(Int(every / .nanoseconds(1))),
            leeway: .nanoseconds(Int(every / .nanoseconds(10))))
        timer.activate()
        return timer
    }

    private func tick() {
        state.withLock { state in
            if state.serviceState.phase == .starting && state.serviceState.isMigrating {
                _ = socket?.send([Self.longerStart])
            }
            if watchdog != nil && state.serviceState.isAlive(at: .now) { _ = socket?.send(["WATCHDOG=1"]) }
            flush(&state)
        }
    }

    /// Sends what has not got through yet, in its order, and the status if it has changed.
    ///
    /// The status goes by itself: systemd drops a datagram that is too long for it, and nothing else shall go with it.
    private func flush(_ state: inout State) {
        guard let socket else { return }
        while let next = state.unsent.first, socket.send(next) { state.unsent.removeFirst() }
        let status = state.serviceState.status
        if state.unsent.isEmpty, status != state.told, socket.send(["STATUS=\(status)"]) {
            state.told = status
            state.toldAt = .now
        }
    }

    /// Says something that must get through, now or with the next tick.
    private func report(_ assignments: [String], in state: inout State) {
        guard socket != nil else { return }
        state.unsent.append(assignments)
        flush(&state)
    }

    /// Takes a report, and passes on what it changes; a mere change of the status at most once a second.
    private func update(_ change: (inout ServiceState) -> Void) {
        state.withLock { state in
            change(&state.serviceState)
            if state.serviceState.phase == .starting && state.serviceState.isComplete {
                state.serviceState.phase = .running
                report(["READY=1"], in: &state)
            } else if state.toldAt.duration(to: .now) >= Self.statusPause {
                flush(&state)
            }
        }
    }

    /// Whether the database has answered every worker that is always there.
    var isComplete: Bool { state.withLock { $0.serviceState.isComplete } }

    // Reports of the workers.

    /// The worker lives, and is heard of again within that time.
    func beat(_ part: ServiceState.Part, within: Duration, unansweredFor: Duration = .zero) {
        update { $0.beat(part, heardOfBy: .now + within, unansweredFor: unansweredFor) }
    }

    func connecting(_ part: ServiceState.Part, within: Duration) {
        update {
            $0.beat(part, heardOfBy: .now + within)
            $0.connecting(part, at: .now)
        }
    }
    func connected(_ part: ServiceState.Part) { update { $0.connected(part) } }
    func left(_ part: ServiceState.Part) { update { $0.left(part) } }
    func inTheWay(_ words: String?, isAway: Bool = false, knowsQueue: Bool = false, of part: ServiceState.Part) {
        update { $0.obstacle(words, isAway: isAway, knowsQueue: knowsQueue, of: part, at: .now) }
    }
    func migrates(_ isMigrating: Bool) { update { $0.isMigrating = isMigrating } }
    func sees(_ queue: Heartbeat.Queue) { update { $0.queue = queue } }
    func sweeps(_ isSweeping: Bool) { update { $0.isSweeping = isSweeping } }
    func lastSweep(at: Date, outcome: String) { update { $0.lastSweep = (at, outcome) } }

    // The process's own word.

    /// The configuration is being read anew; systemd wants to know since when, by the monotonic clock.
    func reloading() {
        var now = timespec()
        _ = unsafe clock_gettime(CLOCK_MONOTONIC, &now)
        state.withLock { state in
            // One that is not ready yet has nothing to tell: it would become ready by the end of this.
            guard state.serviceState.phase == .running else { return }
            state.serviceState.phase = .reloading
            report(["RELOADING=1", "MONOTONIC_USEC=\(now.tv_sec * 1_000_000 + now.tv_nsec / 1000)"], in: &state)
        }
    }

    /// - Parameter refusal: Why everything stays as it was; nil when it was taken up.
    func reloaded(refusal: String?) {
        state.withLock { state in
            state.serviceState.refusedReload = refusal
            guard state.serviceState.phase == .reloading else { return }
            state.serviceState.phase = .running
            report(["READY=1"], in: &state)
        }
    }

    /// - Parameter failure: What a person must mend, when that is why.
    func stopping(failure: String?) {
        state.withLock { state in
            state.serviceState.stopping(failure: failure)
            report(["STOPPING=1"], in: &state)
        }
    }

    /// - Parameter inTime: False when a batch was cut off.
    func stopped(inTime: Bool) {
        state.withLock { state in
            state.serviceState.stopped(inTime: inTime)
            flush(&state)
        }
    }
}
