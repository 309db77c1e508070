/// How sending is measured, in words.
struct SendingMethod {
    let scale: Scale

    var lines: [String] {
        [
            "- **The clients** are processes of their own, over TLS on 127.0.0.1, one after the other; each meets a server that was just started. All send the same payload of",
            "  \(SendingWork.payload.utf8.count) bytes to the same \(SendingWork.tokens) tokens in turn, with `apns-topic`, `apns-push-type` and a provider token, \(SendingClient.inFlight) requests under way. The clock of each",
            "  runs from before its first connection to its last answer; the processor time is that of the whole process, start and end included.",
            "- **tokenkeeperd's client** is the daemon's, driven as the daemon drives it: requests submitted in lots, answers collected in lots. Each request has a UUID of its own,",
            "  which goes as `apns-id`. It may have \(SendingClient.connections) connections and opens the second when the first has no room, which here is never.",
            "- **h2load** has \(SendingClient.connections) connections with \(SendingClient.inFlight / SendingClient.connections) streams each. It makes its headers once, sends no `apns-id`, keeps no answer and verifies no certificate: what HTTP/2 costs at the least.",
            "- **aioapns** has its own defaults and sends a tenth of the requests, \(scale.sends / 10). Its first request goes alone: what is refused before a connection has",
            "  proved itself it waits for without end. It sends `apns-id` as well.",
            "- **The fake APNs** ([docs/fake-apns.md](../fake-apns.md)) is built for release, has one thread, checks the provider token and all else of each request, and allows a stream until it has seen a valid one; it",
            "  keeps counts only. **nghttpd** has one thread, looks for a file and checks nothing; it answers before it has read the payload.",
            "- **Other counts disqualify**: the server must have seen each request once and nothing else, and the client must have as many answers.",
            "- **Memory** is called flat when it is at the end not more than a tenth above what it was after a quarter.",
            "- **The outbox**: the daemon as a process beside a private PostgreSQL (see [the other page](README.md#how)), stopped while \(scale.outboxSends) requests for as many tokens were inserted, from",
            "  the moment it is let go until the last answer is counted in the ledger: claims behind the gate, sending, writing down, and the drain of the answers meanwhile. What the",
            "  fake takes of the machine's cores is not in the processor times, but in the rate.",
            "",
            "Not claimed: what any of it does over a network, where an answer takes its time, or with Apple's servers, of whose limits nobody knows.",
        ]
    }
}
