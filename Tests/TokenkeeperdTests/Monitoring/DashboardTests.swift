import Foundation
import LedgerTestSupport
import Testing

/// What the tests look at in `monitoring/grafana-dashboard.json`.
struct Dashboard: Decodable {
    struct Panel: Decodable {
        struct Place: Decodable { var h: Int, w: Int, x: Int, y: Int }
        struct Source: Decodable { var uid: String }
        struct Target: Decodable {
            var refId: String
            var expr: String
            var datasource: Source
        }
        var id: Int
        var type: String
        var title: String
        var gridPos: Place
        var datasource: Source?
        var targets: [Target]?

        /// The cells that it covers.
        var cells: [[Int]] {
            (gridPos.x..<gridPos.x + gridPos.w).flatMap { x in
                (gridPos.y..<gridPos.y + gridPos.h).map { [x, $0] }
            }
        }
    }
    struct Variables: Decodable { var list: [Variable] }
    struct Variable: Decodable { var name: String }
    var panels: [Panel]
    var templating: Variables

    static func load() throws -> Self {
        try JSONDecoder().decode(Self.self, from: Data(PackagedProgram.monitoring("grafana-dashboard.json").utf8))
    }

    /// All expressions, with the variables as Grafana replaces them if everything of the job `tokenkeeperd` is chosen.
    var expressions: [String] {
        panels.flatMap { $0.targets ?? [] }.map(\.expr).map {
            $0.replacing("$__rate_interval", with: "1m").replacing("$job", with: "tokenkeeperd")
                .replacing(#/\$(instance|environment|topic)/#, with: ".+")
        }
    }

    /// The names of the metrics in an expression.
    static func metrics(in expression: String) -> Set<String> {
        Set(expression.matches(of: #/\btokenkeeper_\w+/#).map { String($0.output) })
    }
}

@Suite struct `The dashboard` {
    @Test func `its panels do not overlap, have numbers of their own, and ask the chosen data source`() throws {
        let panels = try Dashboard.load().panels
        #expect(panels.count > 30 && Set(panels.map(\.id)).count == panels.count)
        let cells = panels.flatMap(\.cells)
        #expect(Set(cells).count == cells.count)
        #expect(panels.allSatisfy { $0.gridPos.x + $0.gridPos.w <= 24 })
        for panel in panels where panel.type != "row" {
            let targets = panel.targets ?? []
            #expect(panel.datasource?.uid == "${datasource}" && !targets.isEmpty, "\(panel.title)")
            #expect(targets.allSatisfy { $0.datasource.uid == "${datasource}" }, "\(panel.title)")
            #expect(Set(targets.map(\.refId)).count == targets.count, "\(panel.title)")
        }
    }

    @Test func `it uses no variable that it does not have`() throws {
        let dashboard = try Dashboard.load()
        let variables = Set(dashboard.templating.list.map(\.name))
        let used = dashboard.panels.flatMap { $0.targets ?? [] }.flatMap { target in
            target.expr.matches(of: #/\$(\w+)/#).map { String($0.output.1) }
        }
        #expect(Set(used).subtracting(variables) == ["__rate_interval"])
    }
}
