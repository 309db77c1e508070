/// Why requests wait, or what else an operator should know: a sentence about one or more credentials or topics. Pure.
struct WaitingProblem: Equatable {
    var before: String
    /// Whom it concerns, in order. Empty if the sentence is about nobody in particular.
    var who: [String] = []
    var after = ""

    /// How many are named.
    private static let named = 3

    /// The same as long as the reason is the same, whomever it concerns.
    let cause: String

    init(_ words: String) {
        before = words
        cause = words
    }

    /// - Parameter cause: Nil for the sentence without its numbers: those in an error message, such as a duration, change each time.
    init(_ before: String, _ who: String, _ after: String, cause: String? = nil) {
        (self.before, self.who, self.after) = (before, [who], after)
        self.cause = cause ?? (before + after).filter { !$0.isNumber }
    }

    var words: String {
        let more = who.count > Self.named ? ["\(who.count - Self.named) more"] : []
        return before + (who.prefix(Self.named) + more).joined(separator: "; ") + after
    }

    /// One for each cause, in the order in which they come first.
    static func joined(_ problems: [WaitingProblem]) -> [WaitingProblem] {
        var joined: [WaitingProblem] = []
        var places: [String: Int] = [:]
        for problem in problems {
            if let place = places[problem.cause] {
                joined[place].who += problem.who
            } else {
                places[problem.cause] = joined.count
                joined.append(problem)
            }
        }
        return joined
    }
}

extension [WaitingProblem] {
    /// The first ones, and a sentence that says how many more there are.
    func first(_ most: Int) -> [WaitingProblem] {
        count > most
            ? prefix(most) + [WaitingProblem("", "\(count - most)", " more causes keep requests waiting")] : self
    }
}
