/// The text on how sending is measured.
struct SendingMethod {
    let scale: Scale

    var lines: [String] {
        [
            "- **The clients** are separate processes that run one after the other, over TLS on 127.0.0.1, each with a newly started server. All send",
            "  the same payload of \(SendingWork.payload.utf8.count) bytes to the same \(SendingWork.tokens) tokens in turn, with `apns-topic`, `apns-push-type` and a provider token,",
            "  and keep \(SendingClient.inFlight) requests in flight. The time runs from before the first connection to the last response; the processor time is",
            "  that of the whole process, start and end included.",
            "- **tokenkeeperd's client** is the daemon's, driven as the daemon drives it: requests are submitted and responses collected in batches. Each request",
            "  has its own UUID as `apns-id`. It may have \(SendingClient.connections) connections and opens the second when the first has no room,",
            "  which never happens here.",
            "- **h2load** has \(SendingClient.connections) connections with \(SendingClient.inFlight / SendingClient.connections) streams each. It makes its headers once, sends no",
            "  `apns-id`, keeps no response and verifies no certificate: the lower bound of the cost of HTTP/2.",
            "- **An earlier client** (`BENCH_BEFORE=revision`) is that of the benchmark of the revision, which is built like this one, and runs in turn with",
            "  the others.",
            "- **aioapns** has its own defaults and sends a tenth of the requests, \(scale.sends / 10). Its first request is sent alone: it waits forever for a request",
            "  that is refused while the connection allows only one stream. It sends `apns-id` as well.",
            "- **The fake APNs** ([docs/reference/fake-apns.md](../reference/fake-apns.md)) is a release build and has one thread. It checks the provider token",
            "  and everything else of each request, and allows one stream until it has seen a valid token; it keeps counts only. **nghttpd** has one thread,",
            "  looks for a file and checks nothing; it responds before it has read the payload.",
            "- **Other counts disqualify**: the server must have seen each request once and nothing else, and the client must have as many responses.",
            "- **Memory** counts as flat when it ends at most a tenth above what it was after a quarter.",
            "- **Slow links**: a relay in the benchmark's own process carries so many bytes a second in each direction, in segments of 1,460 bytes, and holds",
            "  16 KiB. \(SendingLimits.links.map { "\($0.requests)" }.joined(separator: " and ")) requests with payloads of \(SendingLimits.payload) bytes. The share counts only the payloads, so headers, TLS and the handshake lower it.",
            "- **One stream**: the fake allows one stream, and responds after \(Int(SendingLimits.delay * 1000)) ms. \(SendingLimits.requests) requests over one connection; an earlier client sends a tenth.",
            "- **The outbox**: the daemon in its own process, with a private PostgreSQL (see [the other page](README.md#how)). It is stopped while",
            "  \(scale.outboxSends) requests for as many tokens are inserted. The time runs from the moment it is resumed until the last response is counted",
            "  in the ledger: claims behind the gate, sending, recording, and the drain of the responses meanwhile. The fake's share of the machine's cores is",
            "  not in the processor times, but it affects the rate.",
            "- **Many topics**: the same, with requests of many topics. A transaction for each topic is what the daemon does when a claim of many topics fails,",
            "  which the benchmark brings about by an error in `claim_topics`: a failed claim for up to 50 topics is part of it.",
            "- **Campaigns**: the same daemon, idle, and three campaigns to everyone, one for each topic. The time runs from the call of the first `enqueue`, so",
            "  it includes addressing. The first response is looked for every 2 ms. Bytes are those of the table with its indexes and TOAST. The client's",
            "  processor time is that of its thread.",
            "- **Campaigns on the large ledger**: \(Scale.short(scale.manyTokens)) tokens in three topics, of which every thousandth has a tag. The tagged ones are",
            "  addressed topic by topic, without a daemon, and the times added up. For the first response, a campaign to everyone on one topic is cancelled",
            "  after its first response; after a restart of PostgreSQL, its shared buffers are empty, but the operating system still has the pages.",
            "- **Rates**: three daemons send a campaign by its `max_per_second`. The instants are those at which requests were complete at the fake, in whole",
            "  milliseconds, and the stretches of ten seconds lie between the first and the last of them.",
            "- **Pauses and cancellations**: a campaign to everyone on one topic is stopped at a random moment, between 0.2 and 1 second after its first response.",
            "  The time runs from the end of the call, which is its COMMIT, to the last instant at which a request of the campaign was complete at the fake.",
            "  0 is a campaign whose last request came before that: the call waits for transactions that end requests.",
            "",
            "This page claims nothing about a network, where responses take longer, or about Apple's servers, whose limits are not public.",
        ]
    }
}
