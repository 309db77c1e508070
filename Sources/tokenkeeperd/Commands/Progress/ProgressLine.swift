internal import TokenModel

/// How far a long command has come, in one line. Pure.
struct ProgressLine {
    /// What is being worked on, such as a table or a file.
    let subject: String
    /// What the command counts, in the plural: `rows`, `lines`.
    let items: String
    /// The steps until the end; nil if unknown. It may be an estimate.
    private(set) var total: Int64?
    /// What is done, including what an earlier run did.
    private(set) var steps: Int64
    /// What is counted, including what an earlier run counted. Often the same as the steps; of a file, the steps are bytes.
    private(set) var count: Int64
    /// Why nothing happens at the moment; nil if work goes on.
    var waiting: String?

    private let began: ContinuousClock.Instant
    /// What an earlier run did says nothing about the speed of this one.
    private let before: (steps: Int64, count: Int64)

    init(
        _ subject: String, items: String, total: Int64?, steps: Int64 = 0, count: Int64 = 0,
        at now: ContinuousClock.Instant = .now
    ) {
        self.subject = HistoryText.plain(subject)
        self.items = items
        self.steps = steps
        self.count = count
        began = now
        before = (steps, count)
        expect(total: total)
    }

    /// - Parameter total: The steps until the end, as far as they are known now; nil if unknown.
    mutating func expect(total: Int64?) {
        self.total = total.flatMap { $0 > 0 ? $0 : nil }
    }

    mutating func advance(steps: Int64, count: Int64) {
        self.steps += steps
        self.count += count
        waiting = nil
    }

    /// The line, no longer than the width: what matters least is left out first.
    func text(width: Int, at now: ContinuousClock.Instant) -> String {
        let figures = [percentage, "\(count) \(items)", rate(at: now), waiting ?? timeLeft(at: now)].compactMap(\.self)
        let words = ([subject] + figures).joined(separator: "  ")
        let room = width - words.count - 4
        if let bar = bar(width: min(room, 30)) {
            return ([subject, bar] + figures).joined(separator: "  ")
        }
        if words.count <= width { return words }
        let fitting = stride(from: figures.count, to: 0, by: -1).lazy.map { figures.prefix($0).joined(separator: "  ") }
        return fitting.first { $0.count <= width } ?? String(figures[0].prefix(max(width, 0)))
    }

    /// An estimate that was too small says nothing any more.
    private var share: Double? {
        total.flatMap { $0 >= steps ? Double(steps) / Double($0) : nil }
    }

    /// Rounded down: 100 % is the end and nothing less.
    private var percentage: String? { share.map { "\(Int($0 * 100)) %" } }

    private func bar(width: Int) -> String? {
        guard let share, width >= 8 else { return nil }
        let full = Int(share * Double(width))
        return "[" + String(repeating: "=", count: full) + String(repeating: " ", count: width - full) + "]"
    }

    private func seconds(at now: ContinuousClock.Instant) -> Double {
        Double(began.duration(to: now).microseconds) / 1_000_000
    }

    /// Nil in the first second, which says little about the speed.
    private func rate(at now: ContinuousClock.Instant) -> String? {
        let seconds = seconds(at: now)
        return seconds < 1 || count == before.count ? nil : "\(Int64(Double(count - before.count) / seconds))/s"
    }

    private func timeLeft(at now: ContinuousClock.Instant) -> String? {
        let seconds = seconds(at: now)
        guard let total, total > steps, steps > before.steps, seconds >= 1 else { return nil }
        let left = Double(total - steps) * seconds / Double(steps - before.steps)
        return left < 1_000_000 ? Self.clock(Int(left.rounded(.up))) + " left" : nil
    }

    /// `0:09`, `12:30` or `3:00:00`.
    private static func clock(_ seconds: Int) -> String {
        func two(_ number: Int) -> String { number < 10 ? "0\(number)" : "\(number)" }
        let minutes = seconds / 60
        return minutes < 60
            ? "\(minutes):\(two(seconds % 60))" : "\(minutes / 60):\(two(minutes % 60)):\(two(seconds % 60))"
    }
}
