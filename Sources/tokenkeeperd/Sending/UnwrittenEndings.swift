internal import TokenLedger
internal import TokenModel

/// What the sender has decided but not yet written to the database: endings of requests, and pauses of topics. Pure.
struct UnwrittenEndings {
    private var endings: [RequestEnding] = []
    private var pauses: [(topic: TopicScope, reason: String)] = []

    /// The most endings of one transaction.
    static let batch = 1000

    /// What one transaction writes.
    enum Write: Equatable {
        case pause(TopicScope, reason: String)
        case endings([RequestEnding])
    }

    var isEmpty: Bool { endings.isEmpty && pauses.isEmpty }

    /// Whether so many endings are unwritten that nothing more should be claimed.
    var isBacklog: Bool { endings.count > 4 * Self.batch }

    var numbers: Set<Int64> { Set(endings.map(\.number)) }

    mutating func add(_ ending: RequestEnding) {
        endings.append(ending)
    }

    /// Adds requests that go back to the outbox, as if they had not been tried.
    ///
    /// - Parameter pause: The shortest time that they wait; nil for no longer than before.
    mutating func giveBack(_ requests: [ClaimedRequest], after pause: Duration?) {
        endings += requests.map { RequestEnding(number: $0.number, fate: .returned(pause)) }
    }

    /// Adds claimed requests that this daemon does not know.
    mutating func giveBack(numbers: Set<Int64>) {
        endings += numbers.map { RequestEnding(number: $0, fate: .returned(nil)) }
    }

    /// Adds a pause, unless one of the same topic is unwritten already: the first reason stays.
    mutating func pause(_ topic: TopicScope, reason: String) {
        if !pauses.contains(where: { $0.topic == topic }) { pauses.append((topic, reason)) }
    }

    /// Pauses first: the requests that go back must not be claimed again.
    var next: Write? {
        if let pause = pauses.first { return .pause(pause.topic, reason: pause.reason) }
        return endings.isEmpty ? nil : .endings(Array(endings.prefix(Self.batch)))
    }

    /// What `next` returned is in the database.
    mutating func wrote() {
        if pauses.isEmpty { endings.removeFirst(min(Self.batch, endings.count)) } else { pauses.removeFirst() }
    }
}
