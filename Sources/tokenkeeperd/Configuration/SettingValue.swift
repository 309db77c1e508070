internal import APNsFeedback
internal import TokenModel

/// How the values of a setting are written, and which are valid.
extension Setting {
    /// What the value should be, in words.
    var expected: String {
        switch kind {
        case .text: "a text"
        case .duration(let range, let off):
            "a duration such as \"90s\" or \"30d\", from \(DurationText.text(range.lowerBound)) to "
                + DurationText.text(range.upperBound) + (off ? ", or \"off\"" : "")
        case .integer(let range): "a whole number from \(range.lowerBound) to \(range.upperBound)"
        case .share: "a share such as \"0.5%\", from 0% to 100%, of at most four decimal places"
        case .choice(let words): "one of " + words.joined(separator: ", ")
        case .toggle: "true or false (on or off in a variable or flag)"
        case .words: "an array of strings (separated by blanks in a variable or flag)"
        case .hosts: "an array of host names without * (separated by blanks in a variable or flag)"
        case .server: "a host and a port, such as \"api.push.apple.com:443\""
        case .proxy: "http://host:port, https://host:port or \"none\""
        case .listen: "an IP address and a port, such as \"127.0.0.1:9188\" or \"[::1]:9188\", or unix: with a path"
        }
    }

    /// The value from the file as text; nil if its type does not match the setting's.
    func text(of value: TOMLDocument.Value) -> String? {
        switch (kind, value) {
        case (.integer, .integer(let number)): String(number)
        case (.toggle, .boolean(let isOn)): isOn ? "on" : "off"
        case (.words, .texts(let words)), (.hosts, .texts(let words)):
            words.contains { $0.isEmpty || $0.contains(" ") } ? nil : words.joined(separator: " ")
        case (.integer, _), (.toggle, _), (.words, _), (.hosts, _): nil
        case (_, .text(let text)): text
        default: nil
        }
    }

    /// A value as the file writes it: `"1h"`, `4000`, `true` or `["com.example.app"]`.
    func inTOML(_ text: String) -> String {
        switch kind {
        case .integer: text
        case .toggle: text == "on" ? "true" : "false"
        case .words, .hosts: "[" + text.split(separator: " ").map { "\"\($0)\"" }.joined(separator: ", ") + "]"
        case .text, .duration, .share, .choice, .server, .proxy, .listen: "\"\(text)\""
        }
    }

    /// The default as the documents show it: without quotes, `true` or `false` for a boolean.
    var documentedDefault: String? {
        if case .toggle = kind { defaultValue.map(inTOML) } else { defaultValue }
    }

    /// Whether a value, as text, is valid for the setting.
    func accepts(_ text: String) -> Bool {
        switch kind {
        case .text: !text.isEmpty
        case .duration(let range, let off):
            (off && text == "off") || DurationText.duration(text).map(range.contains) ?? false
        case .integer(let range): Int(text).map(range.contains) ?? false
        case .share: Share(text) != nil
        case .choice(let words): words.contains(text)
        case .toggle: text == "on" || text == "off"
        case .words: text.contains { $0 != " " }
        case .hosts:
            text.contains { $0 != " " }
                && text.split(separator: " ").allSatisfy { $0.wholeMatch(of: #/[A-Za-z0-9._-]+(:[0-9]+)?/#) != nil }
        case .server: PushServer(text) != nil
        case .proxy: ProxySettings.accepts(text)
        case .listen: ListenAddress(text) != nil
        }
    }
}
