internal import TokenLedger
internal import TokenModel

/// A piece of HTML or SVG. Literals are markup; interpolated texts and numbers are escaped, so nothing that a sender wrote can become
/// markup or show a whole device token.
///
/// ```swift
/// let row: HTML = "<tr><td>\(topic)</td></tr>"
/// ```
struct HTML: ExpressibleByStringInterpolation, Sendable {
    private(set) var text: String

    init(stringLiteral text: String) { self.text = text }
    init(stringInterpolation: Interpolation) { text = stringInterpolation.text }

    static func + (left: HTML, right: HTML) -> HTML {
        var sum = left
        sum.text += right.text
        return sum
    }

    struct Interpolation: StringInterpolationProtocol {
        fileprivate var text = ""

        init(literalCapacity: Int, interpolationCount: Int) { text.reserveCapacity(literalCapacity * 2) }
        mutating func appendLiteral(_ literal: String) { text += literal }
        mutating func appendInterpolation(_ html: HTML) { text += html.text }
        mutating func appendInterpolation(_ parts: [HTML]) { for part in parts { text += part.text } }
        mutating func appendInterpolation(_ number: some BinaryInteger) { text += String(number) }
        mutating func appendInterpolation(_ words: String) { text += HTML.escaped(words) }
    }

    /// A text as it can stand between tags and in quoted attributes. Invisible characters, which could reverse or hide what follows, are
    /// replaced. What may be a device token is cut.
    static func escaped(_ text: String) -> String {
        var escaped = ""
        for scalar in DeviceToken.cut(in: text).unicodeScalars {
            switch scalar {
            case "&": escaped += "&amp;"
            case "<": escaped += "&lt;"
            case ">": escaped += "&gt;"
            case "\"": escaped += "&quot;"
            case "'": escaped += "&#39;"
            default:
                let isInvisible = [.control, .format].contains(scalar.properties.generalCategory)
                escaped.unicodeScalars.append(isInvisible ? "\u{FFFD}" : scalar)
            }
        }
        return escaped
    }

    /// Nothing if the condition holds.
    static func unless(_ condition: Bool, _ html: HTML) -> HTML { condition ? "" : html }

    /// A message of the daemon or the database: what stands in backticks is a command or a statement, if it is one of ours and nothing
    /// else.
    static func message(_ text: String) -> HTML {
        var html: HTML = ""
        for (index, part) in text.split(separator: "`", omittingEmptySubsequences: false).enumerated() {
            let part = String(part)
            html = html + (index % 2 == 1 && isCommand(part) ? "<code>\(part)</code>" : "\(part)")
        }
        return html
    }

    private static func isCommand(_ part: String) -> Bool {
        isCall(part)
            || part.hasPrefix("tokenkeeperd ") && ShellWord.isInert(part) && !part.contains { ";&|<>".contains($0) }
    }

    /// Whether it is a statement that calls one of our functions with literals, and does nothing else.
    private static func isCall(_ part: String) -> Bool {
        part.wholeMatch(of: #/SELECT tokenkeeper\.[a-z_]+\((?:'(?:[^'\\]|'')*'(?:, |(?=\)$)))*\)/#) != nil
    }
}
