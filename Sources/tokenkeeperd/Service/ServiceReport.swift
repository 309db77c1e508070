internal import Dispatch
internal import FoundationEssentials
internal import Glibc
internal import Synchronization
internal import TokenLedger

/// Tells the service manager how the daemon is: READY, STATUS, RELOADING, STOPPING, and the watchdog.
///
/// The watchdog is fed by a timer, but only while every duty has kept its promise to be heard of: a duty that hangs ends it.
final class ServiceReport: Sendable {
    private struct State {
        var vitals = Vitals()
        var told = ""
        var toldAt = ContinuousClock.now
    }

    private let state = Mutex(State())
    private let socket: NotifySocket?
    private let watchdog: Duration?

    /// Nobody reads more than a line a second.
    private static let statusPause: Duration = .seconds(1)

    /// Applying migrations may take long: systemd shall not take that for a failed start. Said again while it lasts.
    private static let longerStart = "EXTEND_TIMEOUT_USEC=60000000"

    /// - Parameter environment: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are looked at, as sd_watchdog_enabled(3) does.
    init(environment: [String: String]) {
        socket = NotifySocket(environment["NOTIFY_SOCKET"])
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
            var assignments = watchdog != nil && state.vitals.isAlive(at: .now) ? ["WATCHDOG=1"] : []
            if state.vitals.phase == .starting && state.vitals.isMigrating { assignments.append(Self.longerStart) }
            addStatus(of: &state, to: &assignments)
            if !assignments.isEmpty { socket?.send(assignments) }
        }
    }

    private func addStatus(of state: inout State, to assignments: inout [String]) {
        let status = state.vitals.status
        guard status != state.told else { return }
        state.told = status
        state.toldAt = .now
        assignments.append("STATUS=\(status)")
    }

    /// Takes a report, and passes on what it changes; a mere change of the status at most once a second.
    private func update(_ assignments: [String] = [], _ change: (inout Vitals) -> Void) {
        state.withLock { state in
            change(&state.vitals)
            guard socket != nil else { return }
            var assignments = assignments
            if state.vitals.phase == .starting && state.vitals.isComplete {
                state.vitals.phase = .running
                assignments.append("READY=1")
            }
            guard !assignments.isEmpty || state.toldAt.duration(to: .now) >= Self.statusPause else { return }
            addStatus(of: &state, to: &assignments)
            if !assignments.isEmpty { socket?.send(assignments) }
        }
    }

    // Reports of the duties.

    /// The duty lives, and is heard of again within that time.
    func beat(_ part: Vitals.Part, within: Duration, unansweredFor: Duration = .zero) {
        update { $0.beat(part, heardOfBy: .now + within, unansweredFor: unansweredFor) }
    }

    func connected(_ part: Vitals.Part) { update { $0.connected(part) } }
    func left(_ part: Vitals.Part) { update { $0.left(part) } }
    func inTheWay(_ words: String?, isAway: Bool = false, of part: Vitals.Part) {
        update { $0.obstacle(words, isAway: isAway, of: part, at: .now) }
    }
    func migrates(_ isMigrating: Bool) { update([Self.longerStart]) { $0.isMigrating = isMigrating } }
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
            guard state.vitals.phase == .running else { return }
            state.vitals.phase = .reloading
            var assignments = ["RELOADING=1", "MONOTONIC_USEC=\(now.tv_sec * 1_000_000 + now.tv_nsec / 1000)"]
            addStatus(of: &state, to: &assignments)
            socket?.send(assignments)
        }
    }

    /// - Parameter refusal: Why everything stays as it was; nil when it was taken up.
    func reloaded(refusal: String?) {
        state.withLock { state in
            state.vitals.refusedReload = refusal
            guard state.vitals.phase == .reloading else { return }
            state.vitals.phase = .running
            var assignments = ["READY=1"]
            addStatus(of: &state, to: &assignments)
            socket?.send(assignments)
        }
    }

    /// - Parameter failure: What a person must mend, when that is why.
    func stopping(failure: String?) {
        update(["STOPPING=1"]) { $0.phase = failure.map { .failed($0) } ?? .stopping }
    }
}
