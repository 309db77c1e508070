/// An answer in a script.
struct ScriptedAnswer: Decodable {
    var answer: FakeAnswer

    enum CodingKeys: String, CodingKey, CaseIterable {
        case status, reason, timestamp, raw, never, reset, goAway, close, delay, settings, informational, trailers, cut
    }

    /// An answer has exactly one of these.
    private static let kinds: [CodingKeys] = [.status, .raw, .never, .reset, .goAway, .close]

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        let kinds = file.allKeys.filter(Self.kinds.contains)
        guard kinds.count == 1, let kind = kinds.first else {
            throw file.refused(nil, "expected one of status, raw, never, reset, goAway, close")
        }
        if kind != .status, let stray = [CodingKeys.reason, .timestamp].first(where: file.contains) {
            throw file.refused(stray, "belongs to \"status\"")
        }
        if kind != .status, kind != .raw,
            let stray = [CodingKeys.informational, .trailers, .cut].first(where: file.contains)
        {
            throw file.refused(stray, "belongs to \"status\" or \"raw\"")
        }
        switch kind {
        case .raw: answer = .raw(try file.decode(ScriptedRaw.self, forKey: .raw).raw)
        case .reset: answer = .reset(code: try file.decode(Int.self, forKey: .reset))
        case .goAway: answer = .goAway(try file.decode(ScriptedGoAway.self, forKey: .goAway).goAway)
        case .never:
            guard try file.decode(Bool.self, forKey: .never) else { throw file.refused(.never, "expected true") }
            answer = .never
        case .close:
            guard try file.decode(Bool.self, forKey: .close) else { throw file.refused(.close, "expected true") }
            answer = .close
        default:
            let reason = try file.decodeIfPresent(String.self, forKey: .reason)
            let timestamp = try file.decodeIfPresent(Int64.self, forKey: .timestamp)
            let status = try file.decode(Int.self, forKey: .status)
            guard 200...599 ~= status else { throw file.refused(.status, "is \(status), expected 200 to 599") }
            answer = FakeAnswer(action: .status(status, reason: reason, timestamp: timestamp))
        }
        try read(file)
    }

    private mutating func read(_ file: KeyedDecodingContainer<CodingKeys>) throws {
        if let delay = try file.milliseconds(.delay) { answer = answer.delayed(by: .milliseconds(delay)) }
        if let settings = try file.decodeIfPresent(ScriptedSettings.self, forKey: .settings)?.settings {
            guard settings.after == .zero else { throw file.refused(.settings, "have no \"after\" in an answer") }
            answer = answer.changing(settings)
        }
        if let statuses = try file.decodeIfPresent([Int].self, forKey: .informational) {
            guard statuses.allSatisfy({ 100...199 ~= $0 }) else {
                throw file.refused(.informational, "expected a list of 100 to 199")
            }
            answer = answer.preceded(by: statuses)
        }
        if file.contains(.trailers) { answer = answer.followed(byTrailers: try file.pairs(.trailers)) }
        if let cut = try file.decodeIfPresent(ScriptedCut.self, forKey: .cut)?.cut { answer = answer.cut(cut) }
    }
}

private struct ScriptedCut: Decodable {
    var cut: FakeAnswer.Cut

    enum CodingKeys: String, CodingKey, CaseIterable { case after, by, code }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        switch try file.decodeIfPresent(String.self, forKey: .by) {
        case nil, "reset": cut = .init(by: .reset(code: try file.decodeIfPresent(Int.self, forKey: .code) ?? 0))
        case "close": cut = .init(by: .close)
        case let other?: throw file.refused(.by, "is \"\(other)\", expected reset or close")
        }
        if case .close = cut.way, file.contains(.code) { throw file.refused(.code, "belongs to \"reset\"") }
        if let word = try? file.decode(String.self, forKey: .after) {
            guard word == "end" else {
                throw file.refused(.after, "is \"\(word)\", expected bytes of the body, or end")
            }
            cut.after = nil
        } else if let bytes = try file.decodeIfPresent(Int.self, forKey: .after) {
            guard bytes >= 0 else { throw file.refused(.after, "is \(bytes), expected 0 or more") }
            cut.after = bytes
        }
    }
}

private struct ScriptedRaw: Decodable {
    var raw: FakeAnswer.Raw

    enum CodingKeys: String, CodingKey, CaseIterable { case status, headers, body, repeated, bodyDelay, end }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        raw = FakeAnswer.Raw(status: try file.decode(String.self, forKey: .status))
        raw.headers = try file.pairs(.headers)
        let times = try file.decodeIfPresent(Int.self, forKey: .repeated) ?? 1
        guard 0...1_000_000 ~= times else { throw file.refused(.repeated, "is \(times), expected 0 to 1000000") }
        raw.body = Array(
            String(repeating: try file.decodeIfPresent(String.self, forKey: .body) ?? "", count: times).utf8)
        if let delay = try file.milliseconds(.bodyDelay) { raw.bodyDelay = .milliseconds(delay) }
        switch try file.decodeIfPresent(String.self, forKey: .end) {
        case nil, "normal": break
        case "reset": raw.end = .reset(code: 2)
        case "never": raw.end = .never
        case let other?: throw file.refused(.end, "is \"\(other)\", expected normal, reset or never")
        }
    }
}

extension KeyedDecodingContainer {
    /// Headers: `[["name", "value"], …]`. Empty without the key.
    fileprivate func pairs(_ key: Key) throws -> [(name: String, value: String)] {
        try (decodeIfPresent([[String]].self, forKey: key) ?? []).map { pair in
            guard pair.count == 2 else { throw refused(key, "expected pairs of a name and a value") }
            return (pair[0], pair[1])
        }
    }
}
