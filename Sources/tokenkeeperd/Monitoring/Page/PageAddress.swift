/// The addresses of the status page and its parts. A topic's name is percent-encoded, whatever a sender has made up.
enum PageAddress: Equatable, Sendable {
    case overview
    /// `/topic/production:com.example.app`. A segment of its own could be `..`, which browsers resolve.
    case topic(String, environment: String)
    /// `/campaign/7`.
    case campaign(Int64)
    /// The search. What is searched for is in the body of a POST, so that no log and no history of a browser has a token.
    case find

    /// - Parameter path: As in the request, without the query.
    /// - Returns: Nil for another path.
    init?(path: String) {
        let parts = path.split(separator: "/", maxSplits: 2, omittingEmptySubsequences: false).dropFirst().map(
            String.init)
        switch (parts.first, parts.count) {
        case ("", 1): self = .overview
        case ("find", 1): self = .find
        case ("campaign", 2):
            guard let number = Int64(parts[1]) else { return nil }
            self = .campaign(number)
        case ("topic", 2):
            guard let name = Self.decoded(parts[1][...]), let colon = name.firstIndex(of: ":") else { return nil }
            self = .topic(String(name[name.index(after: colon)...]), environment: String(name[..<colon]))
        default: return nil
        }
    }

    var path: String {
        switch self {
        case .overview: "/"
        case .topic(let topic, let environment): "/topic/" + Self.encoded("\(environment):\(topic)")
        case .campaign(let number): "/campaign/\(number)"
        case .find: "/find"
        }
    }

    /// The address as a page at another one refers to it: relative, so that a proxy may serve all of them below a path of its own.
    func path(from page: PageAddress) -> String {
        let isDeep = page.path.dropFirst().contains("/")
        let path = path.dropFirst()
        return (isDeep ? "../" : path.isEmpty ? "./" : "") + path
    }

    /// What needs no encoding in a path: the unreserved characters of RFC 3986, and the colon.
    private static let plain = Set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:".utf8)

    private static func encoded(_ text: String) -> String {
        let digits = Array("0123456789ABCDEF")
        return text.utf8.reduce(into: "") { encoded, byte in
            if plain.contains(byte) {
                encoded.unicodeScalars.append(Unicode.Scalar(byte))
            } else {
                encoded += "%\(digits[Int(byte >> 4)])\(digits[Int(byte & 15)])"
            }
        }
    }

    /// - Returns: Nil for what is no percent-encoded UTF-8, or has a zero byte, which no text of PostgreSQL has.
    private static func decoded(_ text: Substring) -> String? {
        var bytes: [UInt8] = []
        var rest = text.utf8[...]
        while let byte = rest.popFirst() {
            if byte != UInt8(ascii: "%") {
                bytes.append(byte)
                continue
            }
            let digits = String(decoding: rest.prefix(2), as: UTF8.self)
            guard digits.utf8.count == 2, !digits.hasPrefix("+"), !digits.hasPrefix("-"),
                let code = UInt8(digits, radix: 16)
            else { return nil }
            bytes.append(code)
            rest = rest.dropFirst(2)
        }
        return bytes.contains(0) ? nil : String(validating: bytes, as: UTF8.self)
    }

    /// The value of a field of a form (application/x-www-form-urlencoded); nil if there is none.
    static func field(_ name: String, of form: String) -> String? {
        for field in form.split(separator: "&") where field.hasPrefix(name + "=") {
            let spaced = field.dropFirst(name.count + 1).map { $0 == "+" ? " " : $0 }
            return decoded(String(spaced)[...])
        }
        return nil
    }
}
