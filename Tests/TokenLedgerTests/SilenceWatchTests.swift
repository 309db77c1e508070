import Testing
import TokenModel

@testable import TokenLedger

@Suite struct SilenceWatchTests {
    private let start = ContinuousClock.now
    private let beat = Instant(microseconds: 1_700_000_000_000_000)

    /// Whether the last of these looks finds the daemon silent. Each look has a heartbeat, and comes so many seconds after the start.
    private func isSilent(_ looks: [(beat: Int64, after: Int)]) -> Bool {
        var watch = SilenceWatch(.production)
        var isSilent = false
        for look in looks {
            // Another daemon beats all the time.
            let other = beat.advanced(byMicroseconds: Int64(look.after))
            let isOtherSilent = watch.note("other", other, at: start + .seconds(look.after))
            #expect(!isOtherSilent)
            isSilent = watch.note(
                "one", beat.advanced(byMicroseconds: look.beat), at: start + .seconds(look.after))
        }
        return isSilent
    }

    @Test func `a daemon is silent when the same heartbeat has been seen for half a minute`() {
        #expect(!isSilent([(0, 0)]))
        #expect(!isSilent([(0, 0), (0, 10), (0, 20), (0, 29)]))
        #expect(isSilent([(0, 0), (0, 10), (0, 20), (0, 30)]))
        #expect(isSilent([(0, 0), (0, 20), (0, 40)]))
        #expect(!isSilent([(0, 0), (0, 10), (1, 20), (1, 30)]), "it has beaten")
        #expect(isSilent([(0, 0), (0, 10), (1, 20), (1, 30), (1, 40), (1, 50)]))
    }

    @Test func `after a standstill of everything, nobody is silent before half a minute has passed`() {
        #expect(!isSilent([(0, 0), (0, 10), (0, 20), (0, 300)]))
        #expect(!isSilent([(0, 0), (0, 10), (0, 20), (0, 300), (0, 310), (0, 320)]))
        #expect(isSilent([(0, 0), (0, 10), (0, 20), (0, 300), (0, 310), (0, 320), (0, 330)]))
        #expect(!isSilent([(0, 0), (0, 21), (0, 42), (0, 63)]), "no look follows another")
    }
}
