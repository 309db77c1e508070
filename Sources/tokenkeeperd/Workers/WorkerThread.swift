internal import Glibc

/// A thread for a worker. Workers block in `poll(2)`, which must not happen on Swift's cooperative pool.
enum WorkerThread {
    private final class Body: Sendable {
        let run: @Sendable () -> Void
        init(_ run: @escaping @Sendable () -> Void) { self.run = run }
    }

    /// Starts a thread that runs the closure to its end. The process ends without waiting for it.
    ///
    /// - Parameter name: At most 15 bytes, for `ps -L` and debuggers.
    static func start(_ name: String, _ run: @escaping @Sendable () -> Void) {
        var thread = pthread_t()
        let named = Body {
            setName(name)
            run()
        }
        let body = unsafe Unmanaged.passRetained(named).toOpaque()
        let made = unsafe pthread_create(
            &thread, nil,
            { body in
                if let body = unsafe body { unsafe Unmanaged<Body>.fromOpaque(body).takeRetainedValue().run() }
                return nil
            }, body)
        precondition(made == 0, "cannot create a thread")
        pthread_detach(thread)
    }

    /// Like pthread_setname_np, which the Glibc module does not have.
    private static func setName(_ name: String) {
        let descriptor = unsafe open("/proc/thread-self/comm", O_WRONLY | O_CLOEXEC)
        guard descriptor >= 0 else { return }
        _ = unsafe write(descriptor, name, name.utf8.count)
        close(descriptor)
    }
}
