internal import TokenLedger
internal import TokenModel

/// The results of a day by hour: how many, and which share of them were 410s. The labels are text beside the drawing, because a drawing that
/// shrinks to the width of a phone would shrink them, too.
struct ResultCharts {
    let hours: [ResultHour]
    /// Nil if it is not known.
    let usual: UsualShare?

    /// In a drawing, an hour is this wide, and all of it this high.
    private static let (step, height) = (10.0, 100.0)

    var html: HTML {
        "<div class=\"charts\">\(volume)\(share)</div>"
    }

    private var volume: HTML {
        let top = Self.nice(Double(max(hours.map(\.total).max() ?? 0, 1)))
        let columns = hours.enumerated().map { index, hour -> HTML in
            var y = Self.height
            var parts: [HTML] = []
            for (name, results) in [("s200", hour.accepted), ("s410", hour.stale), ("rest", hour.other)]
            where results > 0 {
                // Even one result is visible next to a million.
                let size = max(Double(results) / top * Self.height, 1)
                y -= size
                parts.append(Self.column(index, name, y: y, size: size))
            }
            let title =
                "\(Figures.hour(hour.at)): \(Figures.count(hour.accepted)) accepted, \(Figures.count(hour.stale)) 410s, "
                + "\(Figures.count(hour.other)) others"
            return "<g><title>\(title)</title>\(parts)</g>"
        }
        let legend: HTML = """
            <span class="key s200"></span>200 <span class="key s410"></span>410 <span class="key rest"></span>other
            """
        return chart(
            "Results per hour", legend, top: Figures.short(Int64(top)),
            middle: top < 2 ? "" : Figures.short(Int64(top / 2)),
            bottom: "0", columns)
    }

    private var share: HTML {
        let shares = hours.map { $0.total > 0 ? Double($0.stale) / Double($0.total) : 0 }
        let band = usual?.band
        let top = min(Self.nice(max(shares.max() ?? 0, (band?.upperBound ?? 0) * 1.2, 0.001)), 1)
        let columns = hours.enumerated().map { index, hour -> HTML in
            let size = shares[index] / top * Self.height
            let isHigh = band.map { shares[index] > $0.upperBound && hour.total >= UsualShare.fewest } ?? false
            let title =
                "\(Figures.hour(hour.at)): \(Figures.count(hour.stale)) of \(Figures.count(hour.total)) results are 410s, "
                + Figures.share(hour.stale, of: hour.total)
            return
                "<g><title>\(title)</title>\(size > 0 ? Self.column(index, isHigh ? "high" : "s410", y: Self.height - size, size: size) : "")</g>"
        }
        var drawn = columns
        if let band {
            let (y, size) = (
                Self.height * (1 - band.upperBound / top), Self.height * (band.upperBound - band.lowerBound) / top
            )
            drawn.insert(
                "<rect class=\"band\" x=\"0\" y=\"\(decimal(y))\" width=\"\(decimal(width))\" height=\"\(decimal(max(size, 1)))\"/>",
                at: 0)
        }
        return chart(
            "410s, as a share of the results of an hour", legend, top: Figures.percent(top),
            middle: Figures.percent(top / 2),
            bottom: "0 %", drawn)
    }

    private var legend: HTML {
        guard let usual else { return "The usual share is not known: reading two weeks took too long." }
        guard let band = usual.band else {
            let since = usual.since.map { "no results before \(Figures.text($0))" } ?? "no results yet"
            return "\(since), so nothing is usual yet."
        }
        return """
            <span class="key band"></span>usual: \(Figures.percent(band.lowerBound)) to \(Figures.percent(band.upperBound)), in 9 of 10 hours of the \
            two weeks before <span class="key high"></span>more
            """
    }

    private var width: Double { Double(hours.count) * Self.step }

    /// A drawing with its labels.
    private func chart(
        _ title: String, _ legend: HTML, top: String, middle: String, bottom: String, _ columns: [HTML]
    ) -> HTML {
        let times = stride(from: 0, to: hours.count, by: 6).map { "<span>\(Figures.hour(hours[$0].at))</span>" as HTML }
        return """
            <figure><figcaption>\(title)</figcaption>
            <div class="plot"><div class="y"><span>\(top)</span><span>\(middle)</span><span>\(bottom)</span></div>
            <svg viewBox="0 0 \(decimal(width)) \(decimal(Self.height))" preserveAspectRatio="none" role="img" aria-label="\(title)">
            <line class="axis" x1="0" y1="50" x2="\(decimal(width))" y2="50"/>
            \(columns)</svg>
            <div class="x">\(times)</div></div>
            <p class="legend">\(legend)</p></figure>
            """
    }

    private static func column(_ index: Int, _ name: String, y: Double, size: Double) -> HTML {
        """
        <rect class="\(name)" x="\(decimal(Double(index) * step + 1))" y="\(decimal(y))" width="\(decimal(step - 2))" height="\(decimal(size))"/>
        """
    }

    /// The next of these numbers with zeros.
    private static func nice(_ value: Double) -> Double {
        var unit = 1e-4
        while unit * 10 < value { unit *= 10 }
        return [1, 2, 3, 4, 5, 6, 8, 10].map { $0 * unit }.first { $0 >= value } ?? value
    }
}

/// How much of something is done, as a bar of parts.
struct ShareBar {
    /// Each with its class in the style sheet.
    let parts: [(name: String, size: Int64)]
    let total: Int64
    /// For those who cannot see it.
    let label: String

    var svg: HTML {
        var x = 0.0
        let rects = parts.map { part -> HTML in
            let width = total > 0 ? Double(part.size) / Double(total) * 1000 : 0
            defer { x += width }
            return
                "<rect class=\"\(part.name)\" x=\"\(decimal(x))\" y=\"0\" width=\"\(decimal(width))\" height=\"10\"/>"
        }
        return """
            <svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="\(label)">\
            <rect class="track" x="0" y="0" width="1000" height="10"/>\(rects)</svg>
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
