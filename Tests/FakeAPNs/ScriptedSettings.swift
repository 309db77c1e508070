/// SETTINGS in a script: in its list `settings`, where `after` gives the time, or in an answer.
struct ScriptedSettings: Decodable {
    var settings: FakeSettings

    enum CodingKeys: String, CodingKey, CaseIterable { case after, maximumStreams, initialWindow }

    init(from decoder: any Decoder) throws {
        let file = try decoder.only(CodingKeys.self)
        settings = FakeSettings(
            maximumStreams: try file.decodeIfPresent(Int.self, forKey: .maximumStreams),
            initialWindow: try file.decodeIfPresent(Int.self, forKey: .initialWindow))
        if let after = try file.milliseconds(.after) { settings.after = .milliseconds(after) }
        if let maximum = settings.maximumStreams, !(0...Int(UInt32.max) ~= maximum) {
            throw file.refused(.maximumStreams, "is \(maximum), expected 0 to 4294967295")
        }
        if let window = settings.initialWindow, !(0...Int(Int32.max) ~= window) {
            throw file.refused(.initialWindow, "is \(window), expected 0 to 2147483647")
        }
        if settings.frame.isEmpty { throw file.refused(nil, "expected \"maximumStreams\" or \"initialWindow\"") }
    }
}
