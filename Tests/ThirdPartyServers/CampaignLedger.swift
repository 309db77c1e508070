import APNsFeedback
import TokenModel

/// What became of the requests of a campaign, by their `apns-id`.
struct CampaignLedger {
    /// With the client now.
    var open: Set<String> = []
    /// How each ended for good.
    private(set) var ended: [String: PushOutcome] = [:]
    /// Requests that have ended and were not open.
    private(set) var endedTwice: [String] = []
    /// How often requests ended unsent, or because the client was backing off. They were given to it again, as the daemon does.
    private(set) var givenBack = 0
    /// How often each request was interrupted: it was sent, and its outcome is that it may have arrived. After the first time it was
    /// given to the client again, as the daemon does; after the second it has failed.
    private(set) var interruptions: [String: Int] = [:]
    /// Of these: those that the backend had not seen by then.
    private var interruptedUnseenIDs: Set<String> = []
    private var lastInterruption: PushFailure?
    /// Of each kill: the requests that were open.
    var kills: [Set<String>] = []
    /// Of each kill: those of them that the backend had seen by then.
    var seenAtKill: [Set<String>] = []
    var seen = Backend.Seen()
    var connections = 0

    /// - Parameter hasSeen: Whether the backend has seen a request.
    /// - Returns: What to give to the client again, and when; nil if the request has ended for good.
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

    // What must not be ----------------------------------------------------------------------------------------------

    /// Requests that ended otherwise than with the backend's answer, but for those that two kills interrupted.
    var failed: [PushOutcome] {
        ended.values.filter { outcome in
            if case .answered(let response) = outcome.end {
                return response.status != (outcome.request.isStale ? 410 : 200)
                    || response.body != (outcome.request.isStale ? Backend.stale : nil)
            }
            return timesKilled(outcome.request.id) < 2
        }
    }

    /// Requests that were interrupted more often than kills met them.
    private var interrupted: [String] {
        interruptions.filter { id, count in count > timesKilled(id) }.map(\.key)
    }

    /// Of these: those that the backend had not seen when they were interrupted, at least once.
    var interruptedUnseen: [String] { interrupted.filter(interruptedUnseenIDs.contains) }

    /// The others: their answer was lost on the way.
    var interruptedSeen: [String] { interrupted.filter { !interruptedUnseenIDs.contains($0) } }

    /// Requests that the backend has seen more often than kills explain: once, and once more for each kill that met them in flight.
    var duplicates: [String] {
        seen.counts.filter { id, count in count > 1 + seenAtKill.count { $0.contains(id) } }.map(\.key)
    }

    /// Of these: those of which the client does not know that they were sent twice.
    var duplicatesUnknown: [String] {
        duplicates.filter { interruptions[$0] == nil && ended[$0].map { $0.sends < 2 } ?? true }
    }

    /// Requests that were answered and that the backend has not seen.
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

    /// One line.
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
