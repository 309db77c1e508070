/// The thread of one or more clients: one loop, whose wait is for the sockets of all of them. Create it, then its clients, then call `run` on a
/// thread.
public final class PushThread: Sendable {
    private let multi = MultiHandle()

    public init() {}

    /// Does the work until all clients have stopped. Call it once.
    ///
    /// - Parameter clients: All that were created with this thread.
    public func run(_ clients: [PushClient]) {
        var loop = PushLoop(clients, multi)
        loop.run()
    }

    /// Ends the current wait, or the next one if there is none.
    func wake() { multi.wake() }
}
