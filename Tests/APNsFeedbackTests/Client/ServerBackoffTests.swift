import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct ServerBackoffTests {
    @Test func `the pauses double up to a minute, and an answer ends them`() {
        var backoff = ServerBackoff()
        var now = ContinuousClock.now
        var pauses: [Duration] = []
        for _ in 1...10 {
            #expect(backoff.remaining(at: now) == nil)
            backoff.failed(at: now, share: 1)
            let pause = backoff.remaining(at: now)
            pauses.append(pause ?? .zero)
            now += pause ?? .zero
        }
        #expect(pauses[..<3] == [.milliseconds(250), .milliseconds(500), .seconds(1)])
        #expect(pauses[8...] == [.seconds(60), .seconds(60)])
        backoff.answered()
        backoff.failed(at: now, share: 0.75)
        #expect(backoff.remaining(at: now) == .milliseconds(250) * 0.75)
    }

    @Test func `attempts that fail together cause one pause`() {
        var backoff = ServerBackoff()
        let now = ContinuousClock.now
        for _ in 1...100 { backoff.failed(at: now, share: 1) }
        #expect(backoff.remaining(at: now) == .milliseconds(250))
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
