internal import ArgumentParser
internal import FoundationEssentials
internal import TokenModel

/// The payload of a push, as a person gives it to a command.
enum PayloadInput {
    /// Whether a text is a JSON object. PostgreSQL and APNs judge the rest.
    static func isObject(_ text: String) -> Bool {
        (try? JSONDecoder().decode(JSONObject.self, from: Data(text.utf8))) != nil
    }

    static func standardInput() -> String {
        var text = ""
        while let line = readLine(strippingNewline: false) { text += line }
        return text
    }

    /// - Parameter path: A file; `-` for standard input.
    static func contents(of path: String) throws(ValidationError) -> String {
        if path == "-" { return standardInput() }
        do {
            return String(decoding: try SecretBytes(contentsOf: path).unprotected, as: UTF8.self)
        } catch {
            throw ValidationError("--payload: \(path) cannot be read: \(error)")
        }
    }

    /// Any one.
    private struct JSONObject: Decodable {
        private struct Name: CodingKey {
            var stringValue: String
            var intValue: Int? { nil }
            init?(stringValue: String) { self.stringValue = stringValue }
            init?(intValue: Int) { nil }
        }

        init(from decoder: any Decoder) throws { _ = try decoder.container(keyedBy: Name.self) }
    }
}
