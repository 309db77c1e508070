import APNsFeedback
import Testing
import TokenLedger
import TokenModel

@testable import tokenkeeperd

private func claimed(_ number: Int64, token: String = "aa") -> ClaimedRequest {
    ClaimedRequest(
        number: number,
        request: PushRequest(
            address: TokenAddress(environment: .production, topic: Topic("t")!, token: DeviceToken(hex: token)!),
            payload: [], pushType: .alert, id: "\(number)"),
        firstSentAt: .now)
}

@Suite struct `Requests in flight` {
    @Test func `one request per token is in flight at a time, in order`() {
        var requests = RequestsInFlight()
        #expect(requests.take([claimed(1), claimed(2, token: "bb"), claimed(3), claimed(4)]).map(\.number) == [1, 2])
        #expect(requests.take([claimed(5), claimed(6, token: "cc")]).map(\.number) == [6])
        let address = claimed(1).request.address
        #expect(requests.count == 6 && requests.inFlight(address)?.number == 1)
        #expect(requests.next(after: address) == "3")
        #expect(requests.inFlight(address)?.number == 3 && requests.count == 5)
        #expect(requests.next(after: address) == "4" && requests.next(after: address) == "5")
        #expect(requests.next(after: address) == nil && requests.inFlight(address) == nil && requests.count == 2)
        #expect(!requests.holds(address) && requests.holds(claimed(2, token: "bb").request.address))
    }

    @Test func `after a response about the token, the requests behind it go back`() {
        var requests = RequestsInFlight()
        _ = requests.take([claimed(1), claimed(2), claimed(3), claimed(4, token: "bb")])
        #expect(requests.giveBack(claimed(1).request.address).map(\.number) == [2, 3])
        #expect(requests.count == 1 && !requests.isEmpty)
        #expect(requests.giveBack(claimed(1).request.address) == [])
        _ = requests.take([claimed(5, token: "cc"), claimed(6, token: "cc"), claimed(7, token: "cc")])
        #expect(requests.withdraw { $0.number == 5 || $0.number == 6 }.map(\.number) == [6])
        #expect(requests.numbers == [4, 5, 7] && requests.count == 3, "the request in flight stays until its end")
        #expect(requests.inFlight { $0.number != 5 }.sorted() == [4] && requests.inFlight { _ in true }.count == 2)
        let address = claimed(5, token: "cc").request.address
        #expect(requests.next(after: address) == "7")
        #expect(requests.next(after: address) == nil)
        #expect(
            requests.giveBack(claimed(4, token: "bb").request.address) == [] && requests.isEmpty && requests.count == 0)
    }

    @Test func `between the end of a request and the next one, nothing is in flight, and all can be withdrawn`() {
        var requests = RequestsInFlight()
        let address = claimed(1).request.address
        _ = requests.take([claimed(1), claimed(2), claimed(3)])
        requests.ended(address)
        #expect(requests.inFlight(address) == nil && requests.next == [2, 3])
        #expect(requests.inFlight { _ in true } == [])
        #expect(requests.take([claimed(4)]).isEmpty, "it queues behind them")
        #expect(requests.withdraw { $0.number == 2 }.count == 1 && requests.next == [3, 4])
        #expect(requests.handOver().map(\.number) == [3] && requests.handOver().isEmpty && requests.next.isEmpty)
        requests.ended(address)
        #expect(requests.withdraw { _ in true }.map(\.number) == [4] && requests.isEmpty && requests.count == 0)
        #expect(requests.take([claimed(5)]).map(\.number) == [5] && requests.handOver().isEmpty)
    }
}

extension RequestsInFlight {
    /// Ends the request in flight. Returns the identifier of the next one.
    fileprivate mutating func next(after address: TokenAddress) -> String? {
        ended(address)
        return handOver().first?.request.id
    }
}
