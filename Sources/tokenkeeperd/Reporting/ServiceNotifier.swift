internal import Dispatch
internal import FoundationEssentials
internal import Glibc
internal import Synchronization
internal import TokenLedger

/// Reports the daemon's state to systemd: READY, STATUS, RELOADING, STOPPING, and the watchdog.
///
/// Start here: the workers report to this class. It keeps their reports in `ServiceState`, a pure value, and sends what changes.
/// A timer feeds the watchdog, but only while every worker reports within the time that it has promised. A worker that hangs
/// stops it.
final class ServiceNotifier: Sendable {
    private struct State {
        var serviceState = ServiceState()
        /// Datagrams that must be delivered and have not been sent yet. Empty if systemd does not listen.
        var unsent: [[String]] = []
        /// The status that was sent last, and when.
        var told = ""
        var toldAt = ContinuousClock.now
    }

    private let state = Mutex(State())
    private let socket: NotifySocket?
    /// Whether NOTIFY_SOCKET is set, but names no usable socket.
    let cannotBeHeard: Bool
    private let watchdog: Duration?

    /// The status is sent at most once in this time.
    private static let statusPause: Duration = .seconds(1)

    /// Migrations may take long: systemd must not treat that as a failed start. Repeated while they run.
    private static let longerStart = "EXTEND_TIMEOUT_USEC=60000000"

    /// - Parameter environment: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are used, as by sd_watchdog_enabled(3).
    init(environment: [String: String]) {
        socket = NotifySocket(environment["NOTIFY_SOCKET"])
        cannotBeHeard = socket == nil && environment["NOTIFY_SOCKET"].map { !$0.isEmpty } ?? false
        let isForUs = environment["WATCHDOG_PID"].map { $0 == "\(getpid())" } ?? true
        let interval = environment["WATCHDOG_USEC"].flatMap { Int64($0) }.flatMap { $0 > 0 ? $0 : nil }
        watchdog = socket != nil && isForUs ? interval.map { .microseconds($0) } : nil
    }

    /// A timer that feeds the watchdog and sends what is still unsent. It runs as long as the returned value is kept.
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

    /// Sends what is still unsent, in order, and the status if it has changed.
    ///
    /// The status has its own datagram: systemd drops a datagram that is too long, and nothing else must be lost with it.
    private func flush(_ state: inout State) {
        guard let socket else { return }
        while let next = state.unsent.first, socket.send(next) { state.unsent.removeFirst() }
        let status = state.serviceState.status
        if state.unsent.isEmpty, status != state.told, socket.send(["STATUS=\(status)"]) {
            state.told = status
            state.toldAt = .now
        }
    }

    /// Sends something that must be delivered, now or with the next tick.
    private func report(_ assignments: [String], in state: inout State) {
        guard socket != nil else { return }
        state.unsent.append(assignments)
        flush(&state)
    }

    /// Takes a report, and sends what it changes. A change of the status alone is sent at most once a second.
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

    /// The state of the daemon at this moment.
    var current: ServiceState { state.withLock { $0.serviceState } }

    /// Whether the database has responded to every worker that always runs.
    var isComplete: Bool { current.isComplete }

    // Reports of the workers.

    /// The worker is alive, and reports again within this time.
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
    func inTheWay(_ words: String?, away: Away? = nil, knowsQueue: Bool = false, of part: ServiceState.Part) {
        update { $0.obstacle(words, away: away, knowsQueue: knowsQueue, of: part, at: .now) }
    }
    func migrates(_ isMigrating: Bool) { update { $0.isMigrating = isMigrating } }
    /// - Parameter summary: Nil if it could not be read.
    func sees(
        _ results: Heartbeat.QueueReport, _ registrations: Heartbeat.QueueReport, _ summary: StatusSummary?
    ) {
        update {
            ($0.queue, $0.waitReason) = (results.queue, results.reason)
            ($0.registrations, $0.sawQueueAt) = (registrations, .now)
            if let summary { $0.summary = summary }
        }
    }
    /// - Parameter problems: What keeps requests waiting, one sentence each.
    func cannotSend(_ problems: [String]) { update { $0.sendingProblems = problems } }
    /// - Parameter failures: What a worker cannot do, while it does the rest.
    func cannot(_ failures: [Chores.Failure], _ part: ServiceState.Part) {
        update { $0.failures[part] = failures }
    }
    func sweeps(_ isSweeping: Bool) { update { $0.isSweeping = isSweeping } }
    func lastSweep(at: Date, outcome: String) { update { $0.lastSweep = (at, outcome) } }

    // Reports of the process.

    /// The configuration is being reloaded. systemd needs the start time by the monotonic clock.
    func reloading() {
        var now = timespec()
        _ = unsafe clock_gettime(CLOCK_MONOTONIC, &now)
        state.withLock { state in
            // Before the daemon is ready, this reports nothing: the end of the reload would report READY.
            guard state.serviceState.phase == .running else { return }
            state.serviceState.phase = .reloading
            report(["RELOADING=1", "MONOTONIC_USEC=\(now.tv_sec * 1_000_000 + now.tv_nsec / 1000)"], in: &state)
        }
    }

    /// - Parameter refusal: Why everything stays as it was; nil if the new configuration is in force.
    func reloaded(refusal: String?) {
        state.withLock { state in
            state.serviceState.refusedReload = refusal
            guard state.serviceState.phase == .reloading else { return }
            state.serviceState.phase = .running
            report(["READY=1"], in: &state)
        }
    }

    /// - Parameter failure: What a person must fix, if that is the reason.
    func stopping(failure: String?) {
        state.withLock { state in
            state.serviceState.stopping(failure: failure)
            report(["STOPPING=1"], in: &state)
        }
    }

    /// - Parameter inTime: False if a batch was interrupted.
    func stopped(inTime: Bool) {
        state.withLock { state in
            state.serviceState.stopped(inTime: inTime)
            flush(&state)
        }
    }
}
