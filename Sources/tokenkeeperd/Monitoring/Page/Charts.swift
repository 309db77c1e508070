internal import TokenModel

/// Results by hour, as stacked columns.
struct ResultColumns {
    /// What a column shows, from below.
    struct Hour: Equatable, Sendable {
        /// As a person reads it, such as `14:00`.
        var name: String
        var accepted: Int64
        var stale: Int64
        var other: Int64

        var total: Int64 { accepted + stale + other }
    }

    let hours: [Hour]

    private static let (width, height, left, bottom) = (720, 150, 46, 18)

    var svg: HTML {
        let most = max(hours.map(\.total).max() ?? 0, 1)
        let step = (Self.width - Self.left) / max(hours.count, 1)
        var columns: [HTML] = []
        for (index, hour) in hours.enumerated() {
            let x = Self.left + index * step
            var y = Double(Self.height)
            var parts: [HTML] = []
            for (name, results) in [("s200", hour.accepted), ("s410", hour.stale), ("rest", hour.other)]
            where results > 0 {
                // Even one result is visible next to a million.
                let size = max(Double(results) / Double(most) * Double(Self.height - 10), 1)
                y -= size
                parts.append(
                    "<rect class=\"\(name)\" x=\"\(x)\" y=\"\(decimal(y))\" width=\"\(max(step - 2, 1))\" height=\"\(decimal(size))\"/>"
                )
            }
            let title =
                "\(hour.name): \(Figures.count(hour.accepted)) accepted, \(Figures.count(hour.stale)) 410s, "
                + "\(Figures.count(hour.other)) others"
            columns.append("<g><title>\(title)</title>\(parts)</g>")
            if index % 6 == 0 {
                columns.append("<text x=\"\(x)\" y=\"\(Self.height + 14)\">\(hour.name)</text>")
            }
        }
        return """
            <svg viewBox="0 0 \(Self.width) \(Self.height + Self.bottom)" role="img" aria-label="Results by hour">
            <line class="axis" x1="\(Self.left)" y1="\(Self.height)" x2="\(Self.width)" y2="\(Self.height)"/>
            <text x="0" y="12">\(Figures.short(most))</text><text x="0" y="\(Self.height)">0</text>
            \(columns)
            </svg>
            """
    }
}

/// How a number went, without axes: the table around it says the rest.
struct Trend {
    /// When and how many, in the order of time.
    let points: [(at: Instant, value: Int64)]
    let from: Instant
    let to: Instant
    /// For those who cannot see it.
    let name: String

    private static let (width, height) = (96, 26)
    /// More points would be narrower than the line.
    private static let mostPoints = 62

    /// Nothing unless there are two points.
    var svg: HTML {
        guard points.count > 1, to > from, let least = points.map(\.value).min(), let most = points.map(\.value).max()
        else { return "" }
        let range = Double(max(most - least, 1))
        let time = Double(to.microseconds - from.microseconds)
        let step = (points.count - 1) / Self.mostPoints + 1
        let path = points.indices.filter { (points.count - 1 - $0) % step == 0 }.map { index in
            let point = points[index]
            let x = Double(point.at.microseconds - from.microseconds) / time * Double(Self.width)
            // A number that did not change is a line in the middle.
            let share = most == least ? 0.5 : Double(point.value - least) / range
            return "\(decimal(x)),\(decimal(Double(Self.height - 2) - share * Double(Self.height - 4)))"
        }
        return """
            <svg width="\(Self.width)" height="\(Self.height)" viewBox="0 0 \(Self.width) \(Self.height)" role="img" aria-label="\(name)">\
            <polyline class="trend" points="\(path.joined(separator: " "))"/></svg>
            """
    }
}

/// With one decimal, as SVG needs it.
private func decimal(_ value: Double) -> String { "\((value * 10).rounded() / 10)" }
