import Foundation

/// Lines in panels, as SVG. Both axes are logarithmic.
struct LinePlot {
    struct Line {
        let name: String
        let points: [(x: Double, y: Double)]
    }

    struct Panel {
        let title: String
        let lines: [Line]
    }

    let title: String
    let panels: [Panel]
    /// Words for a value of x, below the axis.
    let label: (Double) -> String

    private static let colours = [
        "#2f6fdb", "#c9862b", "#3c9a6b", "#b0527a", "#6c5bb0", "#8a8f98", "#2a9bb0", "#a04a2f", "#7a9a2f", "#1d2127",
        "#d0679d", "#c2b000",
    ]
    private static let (left, right, width, height) = (56.0, 400.0, 760.0, 300.0)

    /// The height of a name.
    private static let row = 16.0

    var svg: String {
        var parts: [String] = []
        var top = 44.0
        for panel in panels {
            parts.append(Self.text(12, top + 14, panel.title, "font-weight=\"bold\""))
            parts += lines(of: panel, top: top + 26)
            top += Self.height + 76
        }
        return """
            <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 \(Self.width) \(top)" font-family="sans-serif" font-size="12">
            <rect width="\(Self.width)" height="\(top)" fill="#ffffff"/>
            \(Self.text(12, 24, title, "font-size=\"15\" font-weight=\"bold\""))
            \(parts.joined(separator: "\n"))
            </svg>

            """
    }

    private func lines(of panel: Panel, top: Double) -> [String] {
        let points = panel.lines.flatMap(\.points)
        let xs = Set(points.map(\.x)).sorted()
        guard let first = xs.first, let last = xs.last, first < last else { return [] }
        // Whole powers of two around the values, and 1 in any case.
        let low = (log2(min(points.map(\.y).min() ?? 1, 1))).rounded(.down)
        let high = max(log2(max(points.map(\.y).max() ?? 1, 1)).rounded(.up), low + 1)
        func across(_ x: Double) -> Double { Self.left + log(x / first) / log(last / first) * (Self.right - Self.left) }
        func down(_ y: Double) -> Double { top + (high - log2(y)) / (high - low) * Self.height }

        var parts: [String] = []
        for power in Int(low)...Int(high) {
            let y = down(exp2(Double(power)))
            parts.append(Self.stroke([(Self.left, y), (Self.right, y)], power == 0 ? "#8a8f98" : "#e3e5e8", 1))
            parts.append(Self.text(Self.left - 8, y + 4, Self.number(exp2(Double(power))), "text-anchor=\"end\""))
        }
        for x in xs {
            parts.append(Self.stroke([(across(x), top), (across(x), top + Self.height)], "#e3e5e8", 1))
            parts.append(Self.text(across(x), top + Self.height + 18, label(x), "text-anchor=\"middle\""))
        }
        // The names at the right end of their lines, from top to bottom, moved apart where they would overlap.
        let ordered = panel.lines.enumerated().filter { !$0.element.points.isEmpty }
            .sorted { $0.element.points.last!.y > $1.element.points.last!.y }
        var rows: [Double] = []
        for (_, line) in ordered {
            rows.append(max(down(line.points.last!.y), (rows.last ?? top - Self.row) + Self.row))
        }
        for row in rows.indices.reversed() {
            let lowest = row == rows.count - 1 ? top + Self.height : rows[row + 1] - Self.row
            rows[row] = min(rows[row], lowest)
        }
        for ((index, line), row) in zip(ordered, rows) {
            let colour = Self.colours[index % Self.colours.count]
            let places = line.points.map { (across($0.x), down($0.y)) }
            parts.append(Self.stroke(places, colour, 2))
            parts.append(Self.stroke([places.last!, (Self.right + 26, row)], colour, 1))
            parts.append(
                Self.text(Self.right + 30, row + 4, "\(line.name): \(Self.number(line.points.last!.y))", "", colour))
        }
        return parts
    }

    private static func stroke(_ points: [(Double, Double)], _ colour: String, _ width: Double) -> String {
        let places = points.map { "\(short($0.0)),\(short($0.1))" }.joined(separator: " ")
        return "<polyline points=\"\(places)\" fill=\"none\" stroke=\"\(colour)\" stroke-width=\"\(short(width))\"/>"
    }

    private static func text(
        _ x: Double, _ y: Double, _ words: String, _ more: String = "", _ colour: String = "#1d2127"
    ) -> String {
        "<text x=\"\(short(x))\" y=\"\(short(y))\" fill=\"\(colour)\"\(more.isEmpty ? "" : " " + more)>"
            + words.replacing("&", with: "&amp;").replacing("<", with: "&lt;") + "</text>"
    }

    private static func short(_ value: Double) -> String { "\((value * 10).rounded() / 10)" }

    private static func number(_ value: Double) -> String {
        value == value.rounded() ? "\(Int(value))" : String(format: "%.2f", value)
    }
}
