private struct AnyKey: CodingKey {
    let stringValue: String
    var intValue: Int? { nil }

    init(stringValue: String) { self.stringValue = stringValue }
    init?(intValue: Int) { nil }
}

extension Decoder {
    /// An object with these keys and no others.
    func only<Keys: CodingKey & CaseIterable>(_ keys: Keys.Type) throws -> KeyedDecodingContainer<Keys> {
        for key in try container(keyedBy: AnyKey.self).allKeys where Keys(stringValue: key.stringValue) == nil {
            let known = Keys.allCases.map(\.stringValue).joined(separator: ", ")
            let fault = "unknown key \"\(key.stringValue)\", expected some of \(known)"
            throw DecodingError.dataCorrupted(.init(codingPath: codingPath, debugDescription: fault))
        }
        return try container(keyedBy: keys)
    }
}

extension KeyedDecodingContainer {
    func refused(_ key: Key?, _ fault: String) -> DecodingError {
        .dataCorrupted(.init(codingPath: codingPath + (key.map { [$0] } ?? []), debugDescription: fault))
    }

    /// The file has seconds.
    func milliseconds(_ key: Key) throws -> Int64? {
        guard let seconds = try decodeIfPresent(Double.self, forKey: key) else { return nil }
        guard 0..<1e9 ~= seconds else { throw refused(key, "is \(seconds), expected seconds, 0 or more") }
        return Int64(seconds * 1000)
    }
}
