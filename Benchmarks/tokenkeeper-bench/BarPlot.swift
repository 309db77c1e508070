/// Bars in groups, as SVG. Each group has its own scale, because comparisons are within a group.
struct BarPlot {
    let title: String
    let groups: [(group: String, bars: [(name: String, rate: Double)])]

    private static let colours = ["#8a8f98", "#2f6fdb", "#8fb3ee", "#c9862b", "#3c9a6b", "#b0527a"]
    private static let (left, width, barHeight, gap) = (190.0, 760.0, 20.0, 5.0)

    var svg: String {
        var parts: [String] = []
        var y = 44.0
        for (group, bars) in groups {
            let scale = (Self.width - Self.left - 110) / (bars.map(\.rate).max() ?? 1)
            y += 10
            parts.append(Self.text(12, y + 4, Self.escaped(group), "font-weight=\"bold\""))
            y += 14
            for (index, bar) in bars.enumerated() {
                let length = max(bar.rate * scale, 1)
                parts.append(
                    Self.text(
                        Self.left - 8, y + Self.barHeight * 0.7, Self.escaped(bar.name), "text-anchor=\"end\""))
                parts.append(
                    """
                    <rect x="\(Self.left)" y="\(y)" width="\(Self.short(length))" height="\(Self.barHeight)" rx="2" \
                    fill="\(Self.colours[index % Self.colours.count])"/>
                    """)
                parts.append(
                    Self.text(Self.left + length + 6, y + Self.barHeight * 0.7, Self.thousands(bar.rate)))
                y += Self.barHeight + Self.gap
            }
        }
        let height = y + 10
        return """
            <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 \(Self.width) \(height)" font-family="sans-serif" font-size="12">
            <rect width="\(Self.width)" height="\(height)" fill="#ffffff"/>
            \(Self.text(12, 24, Self.escaped(title), "font-size=\"15\" font-weight=\"bold\""))
            \(parts.joined(separator: "\n"))
            </svg>

            """
    }

    private static func text(_ x: Double, _ y: Double, _ words: String, _ more: String = "") -> String {
        "<text x=\"\(short(x))\" y=\"\(short(y))\" fill=\"#1d2127\"\(more.isEmpty ? "" : " " + more)>\(words)</text>"
    }

    private static func short(_ value: Double) -> String { "\((value * 10).rounded() / 10)" }

    private static func thousands(_ value: Double) -> String {
        var digits = "\(Int(value))"
        var groups: [String] = []
        while digits.count > 3 {
            groups.insert(String(digits.suffix(3)), at: 0)
            digits.removeLast(3)
        }
        return ([digits] + groups).joined(separator: " ")
    }

    private static func escaped(_ text: String) -> String {
        text.replacing("&", with: "&amp;").replacing("<", with: "&lt;")
    }
}
