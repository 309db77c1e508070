internal import Glibc

/// Shows on a terminal how far a long command has come. It writes nothing if standard error is not a terminal.
///
/// `ProgressLine` decides what is shown. Call `finish` or `clear` before anything else is printed.
struct ProgressBar {
    private var line: ProgressLine
    private let isShown: Bool
    private var drawnAt: ContinuousClock.Instant?

    /// The shortest time between two drawings.
    private static let pause: Duration = .milliseconds(100)

    /// - Parameters:
    ///   - subject: What is being worked on, such as a table or a file.
    ///   - items: What is counted, in the plural: `rows`, `lines`.
    ///   - total: The steps until the end; nil if unknown. It may be an estimate.
    ///   - steps: What an earlier run has done.
    ///   - count: What an earlier run has counted.
    init(_ subject: String, items: String, total: Int64?, steps: Int64 = 0, count: Int64 = 0) {
        line = ProgressLine(subject, items: items, total: total, steps: steps, count: count)
        let kind = unsafe getenv("TERM").map { unsafe String(cString: $0) }
        isShown = isatty(STDERR_FILENO) == 1 && kind != "dumb"
        draw(at: .now)
    }

    /// Says how many steps there are until the end, once more is known; nil if unknown. The next `advance` or `wait` shows it.
    mutating func expect(total: Int64?) { line.expect(total: total) }

    /// For work whose steps are what is counted.
    mutating func advance(by count: Int64) { advance(steps: count, count: count) }

    /// - Parameters:
    ///   - steps: In the unit of the total, such as bytes.
    ///   - count: In items, such as lines.
    mutating func advance(steps: Int64, count: Int64) {
        line.advance(steps: steps, count: count)
        drawIfTime()
    }

    /// Says why nothing happens, until the next `advance`. Call it again and again while that lasts.
    mutating func wait(because reason: String) {
        line.waiting = reason
        drawIfTime()
    }

    /// Draws the last state, and leaves it on the terminal.
    mutating func finish() {
        draw(at: .now)
        if isShown { Self.write("\n") }
        drawnAt = nil
    }

    /// Removes the line from the terminal, so that something else can be printed. The next `advance` draws it again.
    mutating func clear() {
        if isShown, drawnAt != nil { Self.write("\r\u{1B}[K") }
        drawnAt = nil
    }

    private mutating func drawIfTime() {
        let now = ContinuousClock.now
        if let drawnAt, drawnAt.duration(to: now) < Self.pause { return }
        draw(at: now)
    }

    private mutating func draw(at now: ContinuousClock.Instant) {
        guard isShown else { return }
        drawnAt = now
        // A terminal that is written to in its last column may begin a new line.
        Self.write("\r" + line.text(width: Self.width - 1, at: now) + "\u{1B}[K")
    }

    /// The terminal's width in characters, as it is now.
    private static var width: Int {
        var size = winsize()
        let isKnown = unsafe ioctl(STDERR_FILENO, UInt(TIOCGWINSZ), &size) == 0 && size.ws_col > 1
        return isKnown ? Int(size.ws_col) : 80
    }

    /// A line that does not reach the terminal is not worth an error.
    private static func write(_ text: String) {
        let bytes = Array(text.utf8)
        _ = unsafe Glibc.write(STDERR_FILENO, bytes, bytes.count)
    }
}
