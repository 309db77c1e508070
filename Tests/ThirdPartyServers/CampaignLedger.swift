import APNsFeedback
import TokenModel

/// The endings of a campaign's requests, by `apns-id`.
struct CampaignLedger {
    /// The requests that the client holds now.
    var open: Set<String> = []
    /// The final ending of each request.
    private(set) var ended: [String: PushOutcome] = [:]
    /// Requests that have ended and were not open.
    private(set) var endedTwice: [String] = []
    /// How often requests ended unsent, or because the client was backing off. Like the daemon, the campaign submits them again.
    private(set) var givenBack = 0
    /// How often each request was interrupted: it was sent, and may have arrived. Like the daemon, the campaign submits it again after
    /// the first time. After the second time it has failed.
    private(set) var interruptions: [String: Int] = [:]
    /// The interrupted requests that the backend had not seen by then.
    private var interruptedUnseenIDs: Set<String> = []
    private var lastInterruption: PushFailure?
    /// For each kill, the requests that were open.
    var kills: [Set<String>] = []
    /// For each kill, the open requests that the backend had seen by then.
    var seenAtKill: [Set<String>] = []
    var seen = Backend.Seen()
    var connections = 0

    /// - Parameter hasSeen: Whether the backend has seen a request.
    /// - Returns: What to submit again, and when; nil if the ending is final.
    mutating func note(_ outcome: PushOutcome, hasSeen: (String) -> Bool) -> (request: PushRequest, after: Duration)? {
        let id = outcome.request.id
        guard open.remove(id) != nil else {
            endedTwice.append(id)
            return nil
        }
        if case .unanswered(let failure) = outcome.end {
            let pause = failure.retryAfter ?? .milliseconds(100)
            if failure.kind == .backingOff || !failure.mayHaveArrived {
                givenBack += 1
                return (outcome.request, pause)
            }
            interruptions[id, default: 0] += 1
            lastInterruption = failure
            if !hasSeen(id) { interruptedUnseenIDs.insert(id) }
            if interruptions[id] == 1 {
                var again = outcome.request
                again.mayBeRepeated = false
                return (again, pause)
            }
        }
        ended[id] = outcome
        return nil
    }

    // Violations ----------------------------------------------------------------------------------------------

    /// Requests that ended without the backend's answer, except those that two kills interrupted.
    var failed: [PushOutcome] {
        ended.values.filter { outcome in
            if case .answered(let response) = outcome.end {
                return response.status != (outcome.request.isStale ? 410 : 200)
                    || response.body != (outcome.request.isStale ? Backend.stale : nil)
            }
            return timesKilled(outcome.request.id) < 2
        }
    }

    /// Requests that were interrupted more often than kills explain.
    private var interrupted: [String] {
        interruptions.filter { id, count in count > timesKilled(id) }.map(\.key)
    }

    /// Those of them that the backend had not seen when they were interrupted, at least once.
    var interruptedUnseen: [String] { interrupted.filter(interruptedUnseenIDs.contains) }

    /// The others, whose answers were lost on the way.
    var interruptedSeen: [String] { interrupted.filter { !interruptedUnseenIDs.contains($0) } }

    /// Requests that the backend has seen more often than once, plus once for each kill while they were in flight.
    var duplicates: [String] {
        seen.counts.filter { id, count in count > 1 + seenAtKill.count { $0.contains(id) } }.map(\.key)
    }

    /// Those of them that the client did not report as sent twice.
    var duplicatesUnknown: [String] {
        duplicates.filter { interruptions[$0] == nil && ended[$0].map { $0.sends < 2 } ?? true }
    }

    /// Requests with an answer that the backend has not seen.
    var answeredUnseen: [String] {
        ended.filter { id, outcome in
            if case .answered(let response) = outcome.end, [200, 410].contains(response.status) {
                seen.counts[id] == nil
            } else {
                false
            }
        }.map(\.key)
    }

    private func timesKilled(_ id: String) -> Int { kills.count { $0.contains(id) } }

    /// A summary in one line.
    var figures: String {
        let twice = seen.counts.values.count { $0 > 1 }
        let met = kills.isEmpty ? "" : " (\(seenAtKill.map(\.count)) seen and open at the kills)"
        let last = lastInterruption.map { ", the last: \($0.message)" } ?? ""
        return "\(ended.count) ended, \(failed.count) failed; \(interruptions.count) interrupted, "
            + "\(interruptedUnseen.count) of them unseen and \(interruptedSeen.count) seen without a kill\(last); "
            + "\(twice) seen twice\(met), \(duplicates.count) of them without a kill; \(givenBack) given back; "
            + "\(ended.values.count { $0.sends > 1 }) sent more than once; \(connections) connections"
    }
}

extension PushRequest {
    /// Whether the backend answers 410.
    var isStale: Bool { id.last == "0" }
}
