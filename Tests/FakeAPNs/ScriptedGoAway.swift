/// A GOAWAY in a script.
struct ScriptedGoAway: Decodable {
    var goAway = FakeAnswer.GoAway()

    enum CodingKeys: String, CodingKey, CaseIterable { case last, code, reason, closing, notice }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        goAway.last = try Self.last(file)
        switch try file.decodeIfPresent(String.self, forKey: .closing) {
        case nil, "after-streams": break
        case "at-once": goAway.closing = .atOnce
        case "never": goAway.closing = .never
        case let other?: throw file.refused(.closing, "is \"\(other)\", expected after-streams, at-once or never")
        }
        goAway.code = try file.decodeIfPresent(Int.self, forKey: .code) ?? 0
        // Null, or a reason.
        if file.contains(.reason) { goAway.reason = try file.decodeIfPresent(String.self, forKey: .reason) }
        guard file.contains(.notice) else { return }
        switch try? file.decode(String.self, forKey: .notice) {
        case "round-trip": goAway.notice = .roundTrip
        case let other?: throw file.refused(.notice, "is \"\(other)\", expected seconds, or round-trip")
        case nil:
            let time = try file.milliseconds(.notice) ?? 0
            goAway.notice = time == 0 ? .atOnce : .time(.milliseconds(time))
        }
    }

    private static func last(_ file: KeyedDecodingContainer<CodingKeys>) throws -> FakeAnswer.GoAway.Last {
        if let number = try? file.decode(Int.self, forKey: .last) {
            guard 0...Int(Int32.max) ~= number else {
                throw file.refused(.last, "is \(number), expected 0 to 2147483647")
            }
            return .stream(number)
        }
        switch try file.decodeIfPresent(String.self, forKey: .last) {
        case nil, "not-processed": return .thisNotProcessed
        case "processed": return .thisProcessed
        case "seen": return .seen
        case "maximum": return .maximum
        case let other?:
            throw file.refused(
                .last, "is \"\(other)\", expected processed, not-processed, seen, maximum, or a stream's number")
        }
    }
}
