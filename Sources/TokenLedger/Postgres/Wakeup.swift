internal import Glibc

/// Wakes one thread that waits in `poll(2)`. Any thread may ring; several rings before the wait count as one.
public final class Wakeup: Sendable {
    /// The end of a pipe that becomes readable when the bell is rung.
    let descriptor: Int32
    private let bell: Int32

    public init() {
        var ends: [Int32] = [-1, -1]
        let made = unsafe pipe(&ends)
        precondition(made == 0, "cannot create a pipe: out of file descriptors")
        for end in ends {
            _ = fcntl(end, F_SETFL, O_NONBLOCK)
            _ = fcntl(end, F_SETFD, FD_CLOEXEC)
        }
        descriptor = ends[0]
        bell = ends[1]
    }

    deinit {
        close(descriptor)
        close(bell)
    }

    /// Safe from any thread. If the pipe is full, enough rings are waiting already.
    public func ring() {
        var one: UInt8 = 1
        _ = unsafe write(bell, &one, 1)
    }

    /// Waits for a ring or until the time has passed, and takes all rings.
    public func wait(for duration: Duration) {
        var watched = pollfd(fd: descriptor, events: Int16(POLLIN), revents: 0)
        _ = unsafe poll(&watched, 1, Int32(clamping: max(duration.milliseconds, 0)))
        var rings = [UInt8](repeating: 0, count: 64)
        while unsafe read(descriptor, &rings, rings.count) > 0 {}
    }
}
