internal import Glibc
internal import Synchronization
internal import TokenLedger

/// The screen of the terminal that a command runs on: its second page, without cursor and echo, until `close`.
///
/// Only the control sequences of ECMA-48 and xterm's alternate screen, which every terminal of today understands: no library and no
/// terminal database is needed.
final class TerminalScreen: Sendable {
    private let open: Mutex<termios?>

    /// Leaves what is on the terminal as it is, on its first page.
    init() {
        var settings = termios()
        let isTerminal = unsafe tcgetattr(STDIN_FILENO, &settings) == 0
        open = Mutex(settings)
        if isTerminal {
            var raw = settings
            raw.c_lflag &= ~tcflag_t(ICANON | ECHO)
            // A stopped process would leave its page on the screen. VSUSP is number 10: termios(3).
            raw.c_cc.10 = 0
            _ = unsafe tcsetattr(STDIN_FILENO, TCSANOW, &raw)
        }
        // The second page, no cursor, and no wrapping of long lines.
        Self.write("\u{1B}[?1049h\u{1B}[?25l\u{1B}[?7l")
    }

    /// Restores the terminal. Can be called from any thread, and more than once. Nothing is drawn afterwards.
    func close() {
        open.withLock { settings in
            guard var before = settings else { return }
            settings = nil
            Self.write("\u{1B}[?7h\u{1B}[?25h\u{1B}[?1049l")
            _ = unsafe tcsetattr(STDIN_FILENO, TCSANOW, &before)
        }
    }

    /// The size in characters, as it is now.
    var size: (width: Int, height: Int) {
        var size = winsize()
        let isKnown = unsafe ioctl(STDOUT_FILENO, UInt(TIOCGWINSZ), &size) == 0 && size.ws_col > 0 && size.ws_row > 0
        return isKnown ? (Int(size.ws_col), Int(size.ws_row)) : (80, 24)
    }

    /// Replaces what is on the screen, without flicker: each line is overwritten and its rest deleted.
    func draw(_ lines: [String]) {
        open.withLock { settings in
            if settings == nil { return }
            Self.write("\u{1B}[H" + lines.map { $0 + "\u{1B}[K" }.joined(separator: "\r\n") + "\u{1B}[J")
        }
    }

    /// Waits for a key.
    ///
    /// - Returns: Nil if none was pressed within the time.
    func key(within duration: Duration) -> Character? {
        let clock = ContinuousClock()
        let end = clock.now + duration
        var isReadable = true
        while true {
            let left = clock.now.duration(to: end)
            if left <= .zero { return nil }
            var watched = pollfd(fd: isReadable ? STDIN_FILENO : -1, events: Int16(POLLIN), revents: 0)
            guard unsafe poll(&watched, 1, Int32(clamping: left.milliseconds + 1)) > 0 else { continue }
            var byte: UInt8 = 0
            if unsafe read(STDIN_FILENO, &byte, 1) == 1 { return Character(UnicodeScalar(byte)) }
            // The input has ended, as it does for a job in the background: only a signal ends the command now.
            isReadable = false
        }
    }

    private static func write(_ text: String) {
        var bytes = Array(text.utf8)[...]
        while !bytes.isEmpty {
            let count = unsafe bytes.withUnsafeBytes { unsafe Glibc.write(STDOUT_FILENO, $0.baseAddress, $0.count) }
            if count < 0, errno != EINTR, errno != EAGAIN { return }
            bytes = bytes.dropFirst(max(count, 0))
        }
    }
}
