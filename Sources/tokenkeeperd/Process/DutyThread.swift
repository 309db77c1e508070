internal import Glibc

/// A thread of its own for a duty that blocks: in `poll(2)`, never on Swift's cooperative pool.
enum DutyThread {
    private final class Body: Sendable {
        let run: @Sendable () -> Void
        init(_ run: @escaping @Sendable () -> Void) { self.run = run }
    }

    /// Starts a thread that runs the closure to its end. The process ends without waiting for it.
    static func start(_ run: @escaping @Sendable () -> Void) {
        var thread = pthread_t()
        let body = unsafe Unmanaged.passRetained(Body(run)).toOpaque()
        let made = unsafe pthread_create(
            &thread, nil,
            { body in
                if let body = unsafe body { unsafe Unmanaged<Body>.fromOpaque(body).takeRetainedValue().run() }
                return nil
            }, body)
        precondition(made == 0, "no thread to be had")
        pthread_detach(thread)
    }
}
