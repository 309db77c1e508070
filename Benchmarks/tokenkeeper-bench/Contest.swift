import Foundation

/// Contestants that do the same work. Each round has all of them, in a different order each time.
struct Contest {
    struct Contestant {
        let name: String
        let perform: (_ round: Int) throws -> Sample
    }

    let name: String
    private(set) var samples: [String: [Sample]] = [:]
    private let order: [String]

    /// - Throws: What a contestant throws.
    init(_ name: String, rounds: Int, _ contestants: [Contestant]) throws {
        self.name = name
        order = contestants.map(\.name)
        for round in 0..<rounds {
            for contestant in contestants.shuffled() {
                let sample = try contestant.perform(round)
                samples[contestant.name, default: []].append(sample)
                Progress.say(
                    "\(name), round \(round + 1) of \(rounds), \(contestant.name): \(Int(sample.rate)) a second"
                        + String(
                            format: ", %.2f s, server CPU %.2f s, daemon CPU %.2f s", sample.seconds,
                            sample.serverSeconds, sample.daemonSeconds))
            }
        }
    }

    var contestants: [String] { order }

    /// How many times as fast one contestant is as another, round by round.
    func ratio(_ one: String, over other: String) -> Spread {
        Spread(zip(samples[one] ?? [], samples[other] ?? []).map { $0.rate / $1.rate })
    }

    func rate(_ name: String) -> Spread { Spread((samples[name] ?? []).map(\.rate)) }

    /// Microseconds of processor time per row.
    func cpu(_ name: String, _ which: KeyPath<Sample, Double>) -> Spread {
        Spread((samples[name] ?? []).map { $0[keyPath: which] / Double($0.rows) * 1_000_000 })
    }
}
