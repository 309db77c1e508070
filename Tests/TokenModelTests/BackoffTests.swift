import Testing
import TokenModel

@Suite struct `Exponential backoff` {
    @Test func `pauses double up to the longest, and start over after a success`() {
        var backoff = Backoff(from: .milliseconds(250), to: .seconds(1))
        #expect((1...5).map { _ in backoff.next() } == [0.25, 0.5, 1, 1, 1].map { .seconds($0) })
        backoff.reset()
        #expect(backoff.next() == .milliseconds(250))
    }

    @Test func `the longest pause need not be a doubling of the first`() {
        let backoff = Backoff(from: .seconds(15), to: .seconds(100))
        #expect((0...4).map { backoff.pause(after: $0) } == [15, 30, 60, 100, 100].map { .seconds($0) })
    }

    @Test(arguments: [-1, 0, 30, 63, 64, 1_000_000, .max])
    func `any number of failures yields a pause within the limits`(failures: Int) {
        let backoff = Backoff(from: .seconds(15 * 60), to: .seconds(4 * 3600))
        #expect(backoff.pause(after: failures) == (failures < 1 ? backoff.first : backoff.longest))
    }

    @Test func `the longest pause stays the longest, however often an attempt fails`() {
        var backoff = Backoff(from: .milliseconds(1), to: .seconds(60))
        for _ in 1...1000 { _ = backoff.next() }
        #expect(backoff.next() == .seconds(60))
    }

    @Test func `jitter shortens a pause by up to a quarter`() {
        #expect(Duration.seconds(4).jittered(keeping: 1) == .seconds(4))
        #expect(Duration.seconds(4).jittered(keeping: 0.75) == .seconds(3))
        var pauses: Set<Duration> = []
        for _ in 1...100 {
            let pause = Duration.seconds(4).jittered()
            #expect(pause >= .seconds(3) && pause <= .seconds(4))
            pauses.insert(pause)
        }
        #expect(pauses.count > 1, "two daemons do not come back together")
    }
}
