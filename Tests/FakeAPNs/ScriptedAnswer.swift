/// An answer as it stands in a script.
struct ScriptedAnswer: Decodable {
    var answer: FakeAnswer

    enum CodingKeys: String, CodingKey, CaseIterable {
        case status, reason, timestamp, raw, never, reset, goAway, close, delay
    }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        let kinds = file.allKeys.filter { ![.reason, .timestamp, .delay].contains($0) }
        guard kinds.count == 1, let kind = kinds.first else {
            throw file.refused(nil, "expected one of status, raw, never, reset, goAway, close")
        }
        if kind != .status, let stray = [CodingKeys.reason, .timestamp].first(where: file.contains) {
            throw file.refused(stray, "belongs to \"status\"")
        }
        switch kind {
        case .status:
            let reason = try file.decodeIfPresent(String.self, forKey: .reason)
            let timestamp = try file.decodeIfPresent(Int64.self, forKey: .timestamp)
            let status = try file.decode(Int.self, forKey: .status)
            guard 200...599 ~= status else { throw file.refused(.status, "is \(status), expected 200 to 599") }
            answer = FakeAnswer(action: .status(status, reason: reason, timestamp: timestamp))
        case .raw: answer = .raw(try file.decode(ScriptedRaw.self, forKey: .raw).raw)
        case .reset: answer = .reset(code: try file.decode(Int.self, forKey: .reset))
        case .goAway: answer = .goAway(try file.decode(ScriptedGoAway.self, forKey: .goAway).goAway)
        case .never:
            guard try file.decode(Bool.self, forKey: .never) else { throw file.refused(.never, "expected true") }
            answer = .never
        case .close:
            guard try file.decode(Bool.self, forKey: .close) else { throw file.refused(.close, "expected true") }
            answer = .close
        case .reason, .timestamp, .delay: throw file.refused(kind, "says nothing alone")
        }
        if let delay = try file.milliseconds(.delay) { answer = answer.delayed(by: .milliseconds(delay)) }
    }
}

private struct ScriptedRaw: Decodable {
    var raw: FakeAnswer.Raw

    enum CodingKeys: String, CodingKey, CaseIterable { case status, headers, body, repeated, bodyDelay, end }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        raw = FakeAnswer.Raw(status: try file.decode(String.self, forKey: .status))
        for pair in try file.decodeIfPresent([[String]].self, forKey: .headers) ?? [] {
            guard pair.count == 2 else { throw file.refused(.headers, "expected pairs of a name and a value") }
            raw.headers.append((pair[0], pair[1]))
        }
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

private struct ScriptedGoAway: Decodable {
    var goAway = FakeAnswer.GoAway()

    enum CodingKeys: String, CodingKey, CaseIterable { case last, code, reason, closing }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        switch try file.decodeIfPresent(String.self, forKey: .last) {
        case nil, "not-processed": break
        case "processed": goAway.last = .thisProcessed
        case "maximum": goAway.last = .maximum
        case let other?: throw file.refused(.last, "is \"\(other)\", expected processed, not-processed or maximum")
        }
        switch try file.decodeIfPresent(String.self, forKey: .closing) {
        case nil, "after-streams": break
        case "at-once": goAway.closing = .atOnce
        case let other?: throw file.refused(.closing, "is \"\(other)\", expected after-streams or at-once")
        }
        goAway.code = try file.decodeIfPresent(Int.self, forKey: .code) ?? 0
        // Null, or a reason.
        if file.contains(.reason) { goAway.reason = try file.decodeIfPresent(String.self, forKey: .reason) }
    }
}
