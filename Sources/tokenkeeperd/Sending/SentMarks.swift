internal import APNsFeedback

/// Marks which of a daemon's requests may have been sent, in a file that survives `kill -9`. The daemon that takes the requests over
/// learns from it which of them no server can have.
///
/// The worker enters a request before a client gets it. The client's thread marks it. The worker clears it when its ending is committed.
/// So a request whose response was received but not written is still marked.
final class SentMarks: SendObserver {
    private static let kind: Int64 = 0x746b_7365_6e74_0001
    /// A campaign's request has a negative number, and the sign is taken. So this bit, which no number has, stands for it.
    private static let ofCampaign: Int64 = 1 << 62

    /// The words before the slots: the kind of file, the number of slots, and how many requests have none.
    private static let header = 3

    private let words: MappedWords
    private let slots: Int

    /// - Parameter slots: How many requests can be marked at a time.
    init(creating path: String, slots: Int) throws(MappedWords.Failure) {
        words = try MappedWords(creating: path, count: Self.header + slots)
        self.slots = slots
        words.store(Int64(slots), at: 1)
        words.store(Self.kind, at: 0)
    }

    /// The requests of an ended daemon that may have been sent.
    ///
    /// - Returns: Nil if that is not known: the file is missing or damaged, or had too few slots.
    static func sent(in path: String) -> Set<Int64>? {
        guard let words = MappedWords(reading: path), words.count >= header, words.load(0) == kind,
            words.load(1) == Int64(words.count - header), words.load(2) == 0
        else { return nil }
        return (header..<words.count).reduce(into: []) { sent, place in
            let number = words.load(place)
            if number > 0 { sent.insert(number & ofCampaign == 0 ? number : -(number ^ ofCampaign)) }
        }
    }

    /// Enters a request that a client gets now: negative until it is marked.
    func enter(_ number: Int64, in slot: Int) {
        let word = number < 0 ? -number | Self.ofCampaign : number
        if slot < slots { words.store(-word, at: Self.header + slot) }
    }

    /// Clears a slot.
    func clear(_ slot: Int) {
        if slot < slots { words.store(0, at: Self.header + slot) }
    }

    /// Notes how many requests have no slot in the file. Unless it is 0, nothing is known of any request.
    func note(beyond: Int) {
        words.store(Int64(beyond), at: 2)
    }

    func maySend(_ slot: Int) { turn(slot) { $0 < 0 } }

    func didNotSend(_ slot: Int) { turn(slot) { $0 > 0 } }

    /// Changes the sign. A client's late call must not bring back a request whose slot the worker has reused.
    private func turn(_ slot: Int, if isMeant: (Int64) -> Bool) {
        guard slot < slots else { return }
        let value = words.load(Self.header + slot)
        if isMeant(value) { words.replace(value, by: -value, at: Self.header + slot) }
    }
}
