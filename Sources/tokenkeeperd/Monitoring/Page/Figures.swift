internal import TokenLedger
internal import TokenModel

/// Numbers as people read them.
enum Figures {
    /// `1,234,567`.
    static func count(_ value: Int64) -> String {
        var text = ""
        for (index, digit) in String(value.magnitude).reversed().enumerated() {
            if index > 0, index % 3 == 0 { text.append(",") }
            text.append(digit)
        }
        return (value < 0 ? "−" : "") + String(text.reversed())
    }

    /// `+1,234`, `−5` or `±0`.
    static func change(_ value: Int64) -> String { value == 0 ? "±0" : (value > 0 ? "+" : "") + count(value) }

    /// `950`, `12k`, `3.4M`.
    static func short(_ value: Int64) -> String {
        for (unit, name) in [(1_000_000_000, "G"), (1_000_000, "M"), (1000, "k")] where value >= unit {
            let number = Double(value) / Double(unit)
            return (number < 10 && value % Int64(unit) != 0 ? "\((number * 10).rounded() / 10)" : String(Int(number)))
                + name
        }
        return String(value)
    }

    /// `0.25 %`; `< 0.01 %` for less than that, but more than nothing.
    static func share(_ part: Int64, of all: Int64) -> String {
        if all <= 0 { return "–" }
        if part > 0, part * 10_000 < all { return "< 0.01 %" }
        return percent(Double(part) / Double(all))
    }

    /// `0.25 %`, of a share between 0 and 1.
    static func percent(_ share: Double) -> String {
        let hundredths = Int64((share * 10_000).rounded())
        return hundredths % 100 == 0 ? "\(hundredths / 100) %" : "\(Double(hundredths) / 100) %"
    }

    /// `0`, `0.4`, `812`.
    static func rate(_ perSecond: Double) -> String {
        perSecond > 0 && perSecond < 10 ? "\((perSecond * 10).rounded() / 10)" : count(Int64(perSecond))
    }

    /// The time of day, with the date if it is not that of `now`: `14:05:09`, `2026-11-22 14:05:09`. Both as in `text`.
    static func time(_ text: String, at now: String) -> String {
        let text = text.hasSuffix(" UTC") ? String(text.dropLast(4)) : text
        return text.prefix(10) == now.prefix(10) ? String(text.dropFirst(11)) : text
    }

    /// `2026-11-22 14:05:09 UTC`.
    static func text(_ instant: Instant) -> String { ServiceState.text(instant.date) }

    /// `14:00`.
    static func hour(_ instant: Instant) -> String { String(text(instant).dropFirst(11).prefix(5)) }

    /// `12 s`, `5 min`, `3 h`, `2 days`.
    static func age(_ duration: Duration) -> String {
        let seconds = max(duration.components.seconds, 0)
        return switch seconds {
        case ..<120: "\(seconds) s"
        case ..<7200: "\(seconds / 60) min"
        case ..<172_800: "\(seconds / 3600) h"
        default: "\(seconds / 86_400) days"
        }
    }
}
