import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// `monitoring/alerts.yml` and its tests, as promtool sees them.
@Suite(.ownThread) struct `The rules of the alerts` {
    private func promtool(_ arguments: String...) throws -> ProgramRun {
        try ProgramRun([try PackagedProgram.find("promtool")] + arguments)
    }

    private let folder = PackagedProgram.repository.appendingPathComponent("monitoring").path

    @Test func `promtool has no complaint, and all tests of the alerts pass`() throws {
        let check = try promtool("check", "rules", "\(folder)/alerts.yml")
        #expect(check.status == 0 && check.output.contains("SUCCESS: 21 rules found") && check.errors == "")
        let test = try promtool("test", "rules", "\(folder)/alerts_test.yml")
        #expect(test.status == 0 && test.errors == "", "\(test.output) \(test.errors)")
    }

    /// promtool would not miss a test.
    @Test func `each alert has a test in which it fires, and one in which it does not`() throws {
        let alerts = try PackagedProgram.monitoring("alerts.yml").matches(of: #/- alert: (\w+)/#).map {
            String($0.output.1)
        }
        let tests = try PackagedProgram.monitoring("alerts_test.yml")
        let firing = Set(
            tests.matches(of: #/- alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:/#).map { String($0.output.1) })
        let silent = Set(tests.matches(of: #/- {alertname: (\w+), eval_time: \w+}/#).map { String($0.output.1) })
        #expect(alerts.count == 21 && firing == Set(alerts) && silent == Set(alerts))
    }

    @Test func `people are woken up only for what cannot wait`() throws {
        let rules = try PackagedProgram.monitoring("alerts.yml").split(separator: "- alert: ").dropFirst()
        let pages = rules.filter { $0.contains("severity: page") }.map { String($0.prefix { $0.isLetter }) }
        #expect(
            Set(pages) == [
                "TokenkeeperNoLiveDaemon", "TokenkeeperDatabaseAway", "TokenkeeperCrashLoop", "TokenkeeperQueueOld",
                "TokenkeeperOutboxOld", "TokenkeeperGuardTripped",
                "TokenkeeperSendingPaused",
            ])
        // Each cause of the view critical_warning has one.
        let causes = try TestCluster.shared.database().psql(
            "SELECT col_description('tokenkeeper.critical_warning'::regclass, 1)"
        ).matches(of: #/[a-z]+_[a-z]+(?=[:,])/#).map { String($0.output) }
        let selectors = Set(
            try PackagedProgram.monitoring("alerts.yml").matches(of: #/critical\{cause(=~?)"(.+?)"\}/#).map {
                String($0.output.2)
            })
        #expect(causes.count == 10)
        for cause in causes {
            #expect(try selectors.count { try Regex($0).wholeMatch(in: cause) != nil } == 1, "\(cause)")
        }
        #expect(
            rules.allSatisfy {
                $0.contains("for: ") && ($0.contains("severity: page") != $0.contains("severity: ticket"))
            })
    }
}
