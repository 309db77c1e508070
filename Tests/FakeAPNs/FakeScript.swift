import Foundation
import Synchronization

/// Rules and deaths from a JSON file: `docs/reference/fake-apns.md` describes it.
///
/// `FakeAPNs.start(options, script:)` follows it. Rules come before deaths; the first rule that matches decides.
public final class FakeScript: Sendable {
    let deaths: [ScriptedDeath]
    let settings: [FakeSettings]
    private let rules: [ScriptedRule]
    /// How many requests have matched the other conditions of each rule with `every`.
    private let matched: Mutex<[Int]>

    /// - Throws: `FakeScriptFailure`, which names the place of the mistake and what was expected.
    public init(json: String) throws {
        do {
            let file = try JSONDecoder().decode(ScriptFile.self, from: Data(json.utf8))
            rules = file.rules
            deaths = file.deaths
            settings = file.settings
            matched = Mutex(Array(repeating: 0, count: file.rules.count))
        } catch let error as DecodingError {
            throw FakeScriptFailure(error)
        }
    }

    public convenience init(file: String) throws {
        try self.init(json: String(contentsOfFile: file, encoding: .utf8))
    }

    /// Nil if no rule matches.
    public func answer(to request: FakeRequest) -> FakeAnswer? {
        for (index, rule) in rules.enumerated() where rule.match.fits(request) {
            if let every = rule.match.every {
                let count = matched.withLock { counts in
                    counts[index] += 1
                    return counts[index]
                }
                if count % every != 0 { continue }
            }
            return rule.answer
        }
        return nil
    }
}

extension FakeAPNs {
    /// Starts a server with a script. The script's seconds count from now.
    public static func start(_ options: FakeOptions, script: FakeScript) throws -> FakeAPNs {
        let apns = try start(options.following(script)) { script.answer(to: $0) }
        apns.enact(script.deaths)
        return apns
    }

    /// Starts a server with a script. The script's seconds count from now.
    public static func start(_ options: FakeOptions, script: FakeScript) async throws -> FakeAPNs {
        let apns = try await start(options.following(script)) { script.answer(to: $0) }
        apns.enact(script.deaths)
        return apns
    }

    private func enact(_ scripted: [ScriptedDeath]) {
        for death in scripted {
            switch death.whose {
            case .token(let token): deaths.die(token, death.death(startedAt: startedAt))
            case .share(let share): deaths.die(share: share, death.death(startedAt: startedAt))
            }
        }
    }
}

extension FakeOptions {
    fileprivate func following(_ script: FakeScript) -> FakeOptions {
        var options = self
        options.settings += script.settings
        return options
    }
}

/// A mistake in a script: where it is, what was found, what was expected.
public struct FakeScriptFailure: Error, CustomStringConvertible {
    public let description: String

    init(_ error: DecodingError) {
        let (context, what): (DecodingError.Context, String?) =
            switch error {
            case .typeMismatch(_, let context), .dataCorrupted(let context): (context, nil)
            case .valueNotFound(_, let context): (context, "is null")
            case .keyNotFound(let key, let context): (context, "needs \"\(key.stringValue)\"")
            @unknown default: (.init(codingPath: [], debugDescription: "\(error)"), nil)
            }
        let path = context.codingPath.map { $0.intValue.map { "[\($0)]" } ?? ".\($0.stringValue)" }.joined()
        let place = path.isEmpty ? "the script" : "the script, at \(path.drop { $0 == "." })"
        description = "\(place): \(what ?? context.debugDescription)"
    }
}
