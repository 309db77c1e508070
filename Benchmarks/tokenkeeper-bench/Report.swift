/// What was found, measure by measure.
final class Report {
    struct Finding {
        var measure: String
        var figure: String
        var target: String?
        var isReached: Bool?
    }

    struct Rate {
        var work: String
        var contestant: String
        var rowsPerSecond: Spread
        var serverMicroseconds: Spread
        var daemonMicroseconds: Spread
    }

    private(set) var findings: [Finding] = []
    private(set) var rates: [Rate] = []
    /// Rates by share of 410s, for the plot.
    var bars: [(group: String, bars: [(name: String, rate: Double)])] = []
    private(set) var failures: [(name: String, error: String)] = []
    /// Whether all that was asked for has been measured, or has failed.
    var isFinished = false
    /// Called when one measurement has come to its end.
    var onEach: () -> Void = {}

    /// A figure without a target.
    func note(_ measure: String, _ figure: String) {
        add(Finding(measure: measure, figure: figure))
    }

    /// What is right or wrong, whatever time it took.
    func check(_ measure: String, _ figure: String, target: String, isReached: Bool) {
        if !isReached { failures.append((measure, "\(figure), expected \(target)")) }
        add(Finding(measure: measure, figure: figure, target: target, isReached: isReached))
    }

    /// A figure that shall be at least, or at most, so much.
    ///
    /// - Parameter verdict: What a referee says of it. What is disqualified has reached nothing.
    func compare(
        _ measure: String, _ spread: Spread, atLeast least: Double? = nil, atMost most: Double? = nil, digits: Int = 2,
        unit: String = "", verdict: String? = nil
    ) {
        let target =
            least.map { "at least \(Self.plain($0))\(unit)" } ?? most.map { "at most \(Self.plain($0))\(unit)" }
        let isReached = least.map { spread.median >= $0 } ?? most.map { spread.median <= $0 }
        if let verdict { failures.append((measure, verdict)) }
        add(
            Finding(
                measure: measure + (verdict.map { " **\($0)**" } ?? ""), figure: spread.text(digits, unit: unit),
                target: target, isReached: verdict == nil ? isReached : false))
    }

    /// Measures, if asked for; one that fails is told, and those after it go on: the whole takes long.
    func attempt(_ name: String, _ isAskedFor: Bool, _ measure: () throws -> Void) {
        if !isAskedFor { return }
        do {
            try measure()
        } catch {
            Progress.say("FAILED: \(name): \(error)")
            failures.append((name, "\(error)"))
        }
        onEach()
    }

    func add(_ contest: Contest) {
        for name in contest.contestants {
            rates.append(
                Rate(
                    work: contest.name, contestant: name, rowsPerSecond: contest.rate(name),
                    serverMicroseconds: contest.cpu(name, \.serverSeconds),
                    daemonMicroseconds: contest.cpu(name, \.daemonSeconds)))
        }
    }

    private func add(_ finding: Finding) {
        findings.append(finding)
        let verdict = finding.isReached.map { $0 ? ", reached" : ", NOT REACHED" } ?? ""
        Progress.say("== \(finding.measure): \(finding.figure)\(finding.target.map { "; \($0)" } ?? "")\(verdict)")
    }

    private static func plain(_ value: Double) -> String {
        value == value.rounded() ? "\(Int(value))" : "\(value)"
    }
}
