import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct ServerBackoffTests {
    private let now = ContinuousClock.now

    @Test func `the pauses double up to 15 seconds, and an answer ends them`() {
        var backoff = ServerBackoff()
        var now = now
        var pauses: [Duration] = []
        for attempt in 1...10 {
            #expect(backoff.remaining(at: now) == nil)
            backoff.begin()
            backoff.failed(attempt, at: now, share: 1)
            let pause = backoff.remaining(at: now)
            pauses.append(pause ?? .zero)
            now += pause ?? .zero
        }
        #expect(pauses[..<3] == [.milliseconds(250), .milliseconds(500), .seconds(1)])
        #expect(pauses[8...] == [.seconds(15), .seconds(15)])
        backoff.answered(11)
        backoff.failed(12, at: now, share: 0.75)
        #expect(backoff.remaining(at: now) == .milliseconds(250) * 0.75)
    }

    @Test func `attempts that fail together cause one pause`() {
        var backoff = ServerBackoff()
        for attempt in 1...100 { backoff.failed(attempt, at: now, share: 1) }
        #expect(backoff.remaining(at: now) == .milliseconds(250))
    }

    @Test func `an answer on a connection older than the failed attempt does not end the pause`() {
        var backoff = ServerBackoff()
        backoff.failed(2, at: now, share: 1)
        backoff.answered(1)
        #expect(backoff.remaining(at: now) == .milliseconds(250))
        backoff.failed(3, at: now + .milliseconds(250), share: 1)
        backoff.answered(1)
        #expect(backoff.remaining(at: now + .milliseconds(250)) == .milliseconds(500))
        backoff.answered(4)
        #expect(backoff.remaining(at: now + .milliseconds(250)) == nil)
    }

    @Test func `each connection that has answered earns one attempt without a pause, but no more than are allowed`() {
        var backoff = ServerBackoff()
        for _ in 1...10 { backoff.earn(atMost: 2) }
        backoff.failed(3, at: now)
        #expect(backoff.remaining(at: now) == nil)
        for _ in 1...2 { backoff.begin() }
        #expect(backoff.remaining(at: now) != nil)
        backoff.earn(atMost: 2)
        backoff.rest(at: now)
        #expect(backoff.remaining(at: now) != nil, "nothing is left to try")
    }

    @Test func `the third connection without an answer begins a pause`() {
        var backoff = ServerBackoff()
        for number in 1...2 { backoff.wasFruitless(number, at: now) }
        #expect(backoff.remaining(at: now) == nil)
        backoff.answered(1)
        backoff.wasFruitless(3, at: now)
        #expect(backoff.remaining(at: now) != nil)
    }

    @Test func `requests that came back unsent go first; the others keep their order`() {
        var queue = RequestQueue()
        for number in 1...5000 { queue.append(Delivery(request(number))) }
        for number in 1...3000 { #expect(queue.next()?.request == request(number)) }
        queue.giveBack(Delivery(request(7)))
        #expect(queue.count == 2001)
        #expect(queue.next()?.request == request(7))
        #expect(queue.next()?.request == request(3001))
        #expect(queue.takeAll().map(\.request.id) == (3002...5000).map { request($0).id })
        #expect(queue.isEmpty)
    }
}
