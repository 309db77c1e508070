internal import Glibc
internal import TokenLedger
internal import TokenModel

/// `status --watch`: draws the status again and again. While PostgreSQL is away, it shows that, and goes on.
struct StatusWatch {
    let configuration: Configuration
    let interval: Duration

    /// Returns when somebody presses q. A signal ends the process at once, even while a connection is being made.
    func run() {
        let signals = Signals()
        let screen = TerminalScreen()
        for number in [SIGINT, SIGTERM, SIGHUP] {
            signals.on(number) {
                screen.close()
                _exit(ExitStatus.success.rawValue)
            }
        }
        watch(on: screen)
        screen.close()
        withExtendedLifetime(signals) {}
    }

    private func watch(on screen: TerminalScreen) {
        var view = StatusView()
        while true {
            do {
                var connection = try configuration.connectLikeService(writes: false)
                view.database = HistoryText.plain(connection.name)
                try Migrator(daemon: Daemon.version).check(&connection)
                while true {
                    view.show(
                        try StatusReport(on: &connection), try CampaignProgress.running(5, on: &connection),
                        at: Self.time)
                    if quits(after: view, on: screen) { return }
                }
            } catch {
                view.fail("\(error)", at: Self.time)
                if quits(after: view, on: screen) { return }
            }
        }
    }

    /// Draws, and waits until it is time for the next look.
    private func quits(after view: StatusView, on screen: TerminalScreen) -> Bool {
        let size = screen.size
        screen.draw(view.frame(width: size.width, height: size.height, at: Self.time))
        let clock = ContinuousClock()
        let next = clock.now + interval
        while let key = screen.key(within: clock.now.duration(to: next)) {
            if key == "q" { return true }
        }
        return false
    }

    private static var time: String { ServiceState.text(Instant.now.date) }
}
