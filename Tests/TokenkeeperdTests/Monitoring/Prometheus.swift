import Foundation
import LedgerTestSupport

/// A real Prometheus that scrapes daemons every second.
struct Prometheus {
    private let program: PackagedProgram

    /// - Parameters:
    ///   - ports: Where the daemons serve their metrics. Each is a target of the job `tokenkeeperd`.
    ///   - rules: A file of rules.
    init(scraping ports: [Int], rules: String) throws {
        let configuration = """
            global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
            rule_files: [rules.yml]
            scrape_configs:
              - job_name: tokenkeeperd
                static_configs: [{targets: \(ports.map { "127.0.0.1:\($0)" })}]
            """
        program = try PackagedProgram("prometheus", files: ["prometheus.yml": configuration, "rules.yml": rules]) {
            [
                "--config.file=\($0)/prometheus.yml", "--storage.tsdb.path=\($0)/data",
                "--web.listen-address=127.0.0.1:\($1)", "--log.level=warn",
            ]
        }
    }

    private struct Response<Content: Decodable>: Decodable {
        var status: String
        var error: String?
        var data: Content?
    }

    private func ask<Content: Decodable>(_ path: String, _ type: Content.Type) throws -> Content {
        let text = program.get(path)
        let response = try JSONDecoder().decode(Response<Content>.self, from: Data(text.utf8))
        guard let content = response.data, response.status == "success" else {
            throw TestFailure("\(path): \(response.error ?? text)")
        }
        return content
    }

    private struct Alerts: Decodable {
        struct Alert: Decodable {
            var labels: [String: String]
            var annotations: [String: String]
            var state: String
        }
        var alerts: [Alert]
    }

    /// The alerts that fire: the name, without `Tokenkeeper`, and the topic, the reason or the source if it has one, such as
    /// `GuardTripped com.example.app`.
    func firing() throws -> Set<String> {
        Set(
            try ask("/api/v1/alerts", Alerts.self).alerts.filter { $0.state == "firing" }.map { alert in
                let name = alert.labels["alertname"]?.dropFirst("Tokenkeeper".count) ?? ""
                let about = ["topic", "reason", "source"].compactMap { alert.labels[$0] }.first { !$0.isEmpty }
                if name == "DatabaseAway" {
                    return name + (alert.annotations["summary"]?.drop { $0 != "(" }.filter(\.isLetter)).map {
                        " \($0)"
                    }!
                }
                return about.map { "\(name) \($0)" } ?? String(name)
            })
    }

    private struct Rules: Decodable {
        struct Group: Decodable { var rules: [Rule] }
        struct Rule: Decodable {
            var name: String
            var health: String
            var lastError: String?
        }
        var groups: [Group]
    }

    /// What went wrong when the rules were last evaluated; empty if nothing did.
    func ruleErrors() throws -> [String] {
        try ask("/api/v1/rules", Rules.self).groups.flatMap(\.rules)
            .filter { $0.health != "ok" && $0.health != "unknown" }.map { "\($0.name): \($0.lastError ?? $0.health)" }
    }

    /// The names of all metrics that it has scraped.
    func names() throws -> Set<String> {
        Set(try ask("/api/v1/label/__name__/values", [String].self))
    }

    private struct Series: Decodable {
        struct Sample: Decodable { var metric: [String: String] }
        var result: [Sample]
    }

    /// The names of the alerts with the severity `page` that have ever been in a state, without `Tokenkeeper`.
    func everPaged(_ state: String) throws -> Set<String> {
        let query = "max_over_time(ALERTS{severity=\"page\",alertstate=\"\(state)\"}[1h])"
        return Set(
            try ask("/api/v1/query?query=\(Self.escaped(query))", Series.self).result.compactMap {
                $0.metric["alertname"].map { String($0.dropFirst("Tokenkeeper".count)) }
            })
    }

    /// Whether all daemons have been scraped since.
    func hasScraped(since moment: Date) throws -> Bool {
        let query = "min(timestamp(up{job=\"tokenkeeperd\"})) > \(moment.timeIntervalSince1970)"
        return try !ask("/api/v1/query?query=\(Self.escaped(query))", Series.self).result.isEmpty
    }

    private static func escaped(_ query: String) -> String {
        query.addingPercentEncoding(withAllowedCharacters: .alphanumerics) ?? ""
    }

    private struct Result: Decodable { var resultType: String }

    /// Evaluates an expression.
    ///
    /// - Throws: If Prometheus does not understand it.
    func evaluate(_ expression: String) throws {
        _ = try ask("/api/v1/query?query=\(Self.escaped(expression))", Result.self)
    }
}
