/// The findings, measure by measure.
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
    /// Whether every requested measurement has run or failed.
    var isFinished = false
    /// Called after each measurement.
    var onEach: () -> Void = {}

    /// A figure without a target.
    func note(_ measure: String, _ figure: String) {
        add(Finding(measure: measure, figure: figure))
    }

    /// A check that does not depend on time.
    func check(_ measure: String, _ figure: String, target: String, isReached: Bool) {
        if !isReached { failures.append((measure, "\(figure), expected \(target)")) }
        add(Finding(measure: measure, figure: figure, target: target, isReached: isReached))
    }

    /// A figure with a minimum or a maximum as its target.
    ///
    /// - Parameter verdict: The referee's verdict. A disqualified contestant has not reached the target.
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

    /// Runs a measurement if requested. A failure is reported and does not stop the later ones, because a full run takes long.
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
