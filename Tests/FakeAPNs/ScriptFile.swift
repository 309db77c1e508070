/// The content of a script's file. Unknown keys are refused: a rule with a misspelled condition must not match everything.
struct ScriptFile: Decodable {
    var rules: [ScriptedRule]
    var deaths: [ScriptedDeath]
    var settings: [FakeSettings]

    enum CodingKeys: String, CodingKey, CaseIterable { case rules, deaths, settings }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        rules = try file.decodeIfPresent([ScriptedRule].self, forKey: .rules) ?? []
        deaths = try file.decodeIfPresent([ScriptedDeath].self, forKey: .deaths) ?? []
        settings = try (file.decodeIfPresent([ScriptedSettings].self, forKey: .settings) ?? []).map(\.settings)
    }
}

struct ScriptedRule: Decodable {
    var match: ScriptedMatch
    var answer: FakeAnswer

    enum CodingKeys: String, CodingKey, CaseIterable { case match, answer }

    init(from decoder: any Decoder) throws {
        let rule = try decoder.only(CodingKeys.self)
        match = try rule.decodeIfPresent(ScriptedMatch.self, forKey: .match) ?? ScriptedMatch()
        answer = try rule.decode(ScriptedAnswer.self, forKey: .answer).answer
    }
}

/// The conditions of a rule. A request must match all that are given.
struct ScriptedMatch: Decodable {
    var token: String?
    var tokenPrefix: String?
    var topic: String?
    var pushType: String?
    var connection: Int?
    /// The request's number on its connection.
    var connectionFrom: Int?
    var connectionTo: Int?
    var from: Int?
    var to: Int?
    /// Milliseconds since the start.
    var during: Range<Int64>?
    /// Every n-th of the requests that match the other conditions.
    var every: Int?

    enum CodingKeys: String, CodingKey, CaseIterable {
        case token, tokenPrefix, topic, pushType, connection, connectionFrom, connectionTo, from, to, during, every
    }

    init() {}

    init(from decoder: any Decoder) throws {
        let match = try decoder.only(CodingKeys.self)
        token = try match.decodeIfPresent(String.self, forKey: .token)?.lowercased()
        tokenPrefix = try match.decodeIfPresent(String.self, forKey: .tokenPrefix)?.lowercased()
        topic = try match.decodeIfPresent(String.self, forKey: .topic)
        pushType = try match.decodeIfPresent(String.self, forKey: .pushType)
        connection = try match.decodeIfPresent(Int.self, forKey: .connection)
        connectionFrom = try match.decodeIfPresent(Int.self, forKey: .connectionFrom)
        connectionTo = try match.decodeIfPresent(Int.self, forKey: .connectionTo)
        from = try match.decodeIfPresent(Int.self, forKey: .from)
        to = try match.decodeIfPresent(Int.self, forKey: .to)
        every = try match.decodeIfPresent(Int.self, forKey: .every)
        if let every, every < 1 { throw match.refused(.every, "is \(every), expected 1 or more") }
        if let seconds = try match.decodeIfPresent([Double].self, forKey: .during) {
            guard seconds.count == 2, seconds[0] >= 0, seconds[1] > seconds[0], seconds[1] < 1e9 else {
                throw match.refused(.during, "expected [from, to], in seconds since the start")
            }
            during = Int64(seconds[0] * 1000)..<Int64(seconds[1] * 1000)
        }
    }

    func fits(_ request: FakeRequest) -> Bool {
        if let from, request.ordinal < from { return false }
        if let to, request.ordinal > to { return false }
        if let connectionFrom, request.ordinalOfConnection < connectionFrom { return false }
        if let connectionTo, request.ordinalOfConnection > connectionTo { return false }
        if let during, !during.contains(request.sinceStart) { return false }
        if let topic, topic != request.topic { return false }
        if let pushType, pushType != request.pushType { return false }
        if let connection, connection != request.connection { return false }
        if token != nil || tokenPrefix != nil {
            guard let written = request.token?.lowercased() else { return false }
            if let token, token != written { return false }
            if let tokenPrefix, !written.hasPrefix(tokenPrefix) { return false }
        }
        return true
    }
}

struct ScriptedDeath: Decodable {
    enum Whose {
        case token(String)
        case share(Double)
    }
    var whose: Whose
    var topic: String?
    var reason: String
    /// Milliseconds: since the epoch, or since the start.
    var at: Int64?
    var after: Int64?
    var revivedAfter: Int64?

    enum CodingKeys: String, CodingKey, CaseIterable { case token, share, topic, reason, at, after, revivedAfter }

    init(from decoder: any Decoder) throws {
        let death = try decoder.only(CodingKeys.self)
        topic = try death.decodeIfPresent(String.self, forKey: .topic)
        reason = try death.decodeIfPresent(String.self, forKey: .reason) ?? "Unregistered"
        at = try death.decodeIfPresent(Int64.self, forKey: .at)
        after = try death.milliseconds(.after)
        revivedAfter = try death.milliseconds(.revivedAfter)
        let token = try death.decodeIfPresent(String.self, forKey: .token)
        let share = try death.decodeIfPresent(Double.self, forKey: .share)
        switch (token, share) {
        case (let token?, nil): whose = .token(token)
        case (nil, let share?) where 0...1 ~= share: whose = .share(share)
        case (nil, let share?): throw death.refused(.share, "is \(share), expected 0 to 1")
        default: throw death.refused(nil, "expected either \"token\" or \"share\"")
        }
        if at != nil && after != nil { throw death.refused(nil, "expected either \"at\" or \"after\"") }
    }

    func death(startedAt: Int64) -> Deaths.Death {
        Deaths.Death(
            topic: topic, at: at ?? startedAt + (after ?? 0), revivedAt: revivedAfter.map { startedAt + $0 },
            reason: reason)
    }
}
