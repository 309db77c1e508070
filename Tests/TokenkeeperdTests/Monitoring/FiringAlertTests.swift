import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

/// A real Prometheus with the real alerts, real daemons, and real faults. All faults but those that stop the daemons or PostgreSQL are
/// staged together.
@Suite(.ownThread) struct `Prometheus and its alerts` {
    /// The alerts with `for` and the windows in seconds instead of minutes. Everything else is as people get it.
    private static func hastened(_ rules: String) -> String {
        rules.replacing(#/for: \d+[mh]/#, with: "for: 1s")
            .replacing(#/\[(\d+)m\]/#) { "[\($0.output.1)s]" }
            .replacing(#/offset (\d+)m/#) { "offset \($0.output.1)s" }
    }

    @Test func `each alert fires in its fault and clears when it is fixed, and the dashboard's expressions have data`()
        throws
    {
        let faults = try StagedFaults()
        let rules = Self.hastened(try PackagedProgram.monitoring("alerts.yml"))
        #expect(!rules.contains(#/\d+m\b/#), "nothing takes minutes")
        let prometheus = try Prometheus(scraping: faults.ports, rules: rules)
        func awaitAlerts(_ what: String, _ alerts: Set<String>) throws {
            var firing: Set<String> = []
            do {
                try eventually(what) {
                    firing = try prometheus.firing()
                    return firing == alerts
                }
            } catch {
                throw TestFailure(
                    "\(error); missing: \(alerts.subtracting(firing)), too many: \(firing.subtracting(alerts))")
            }
        }
        // A metric of everything that has been sent exists only once something was sent. The certificate is a fault from the start.
        try faults.send("com.example.app")
        try eventually("the metrics are there") {
            try prometheus.names().isSuperset(of: ["tokenkeeper_database_live_daemons", "tokenkeeper_apns_in_flight"])
        }
        try awaitAlerts("nothing else is wrong", ["CredentialExpires"])

        try faults.stage()
        // Failures of APNs are counted within a window, which may be over before the last alert fires.
        let staged: Set = [
            "CredentialExpires", "Rejected", "GuardTripped com.example.guarded", "StaleShare com.example.stale",
            "SweepRefused com.example.due", "SweepOverdue", "SendingPaused com.example.paused", "ApnsFailing",
            "OutboxOld com.nobody.app", "ReloadFailed", "QueueOld", "AttachmentBroken", "FailedSends",
            "Warning publications", "CrashLoop",
        ]
        var fired: Set<String> = []
        do {
            try eventually("each alert has fired") {
                fired.formUnion(try prometheus.firing())
                return fired.isSuperset(of: staged)
            }
        } catch {
            throw TestFailure("\(error); missing: \(staged.subtracting(fired))")
        }
        let page = faults.page
        #expect(page.contains("tokenkeeper_build_info"))
        let check = try ProgramRun([try PackagedProgram.find("promtool"), "check", "metrics"], input: page)
        #expect(check.status == 0 && check.output == "" && check.errors == "", "\(check.output)\(check.errors)")
        try faults.fix()
        try awaitAlerts("all is well", [])

        faults.stopDatabase()
        try awaitAlerts("PostgreSQL is away", ["DatabaseAway connect"])
        try faults.startDatabase()
        try awaitAlerts("PostgreSQL is back", [])
        try faults.refuseLogin()
        try awaitAlerts("PostgreSQL refuses the login", ["DatabaseAway login"])
        try faults.permitLogin()
        try awaitAlerts("it is permitted again", [])
        try faults.revokeRights()
        try awaitAlerts("the role has lost its rights", ["DatabaseAway rights"])
        try faults.grantRights()
        try awaitAlerts("it has them again", [])
        // By now there was everything that a metric counts, also an error of PostgreSQL.
        let names = try prometheus.names()
        for expression in try Dashboard.load().expressions {
            try prometheus.evaluate(expression)
            let unknown = Dashboard.metrics(in: expression).subtracting(names)
            #expect(unknown == [], "\(expression)")
        }

        faults.stopOne()
        try awaitAlerts("one of two daemons is down", ["Down", "FewDaemons"])
        faults.stopOther()
        try awaitAlerts("no daemon is left", ["Down", "NoLiveDaemon"])
        try faults.startBoth()
        try awaitAlerts("both are back", [])
        #expect(try prometheus.ruleErrors() == [])
    }
}
