import Foundation
import LedgerTestSupport

/// PyPI's `aioapns`, in the benchmark's own virtual environment, which is deleted with the work's folder.
struct AIOAPNs {
    let python: String
    /// The versions that were installed, for the report.
    let versions: String

    static let name = "aioapns"
    private static let pinned = ["aioapns==4.0", "h2==4.4.1", "hpack==4.2.0", "hyperframe==6.1.0", "PyJWT==2.15.1"]

    /// - Throws: If Python, pip or PyPI is not available.
    init(_ work: SendingWork) throws {
        let environment = work.folder + "/python"
        try TestCluster.run(["timeout", "60", "python3", "-m", "venv", environment])
        python = environment + "/bin/python"
        try TestCluster.run(
            ["timeout", "120", python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"] + Self.pinned)
        let version = try TestCluster.run([python, "--version"]).trimmingCharacters(in: .whitespacesAndNewlines)
        versions = Self.pinned.prefix(2).map { $0.replacing("==", with: " ") }.joined(separator: ", ") + ", \(version)"
    }

    func client(_ work: SendingWork) -> SendingClient {
        SendingClient(name: Self.name) { server, requests in
            let tokens = work.folder + "/tokens"
            try (0..<SendingWork.tokens).map(SendingWork.token).joined(separator: "\n")
                .write(toFile: tokens, atomically: true, encoding: .utf8)
            let script = work.folder + "/send.py"
            try Self.script.write(toFile: script, atomically: true, encoding: .utf8)
            return [
                python, script, "\(server.port)", work.authorityFile, work.keyFile, SendingWork.keyID,
                SendingWork.teamID, SendingWork.topic, work.payloadFile, tokens, "\(requests)",
                "\(SendingClient.inFlight)",
            ]
        } account: { printed in
            try JSONDecoder().decode(SendingClient.Account.self, from: Data(printed.utf8))
        }
    }

    /// As in its README: one `APNs` with a key and the defaults, and 500 tasks that await `send_notification`. It has no setting
    /// for the server's name, so this changes the constant. Its `ssl_context` gets the CA.
    ///
    /// One request is sent before the others: otherwise aioapns would begin 500 streams on a connection that allows one until it
    /// has seen a valid token, and wait forever for the refused ones.
    private static let script = #"""
        import asyncio, json, ssl, sys, time
        from collections import Counter
        from uuid import uuid4
        from aioapns import APNs, NotificationRequest, PushType
        from aioapns.connection import APNsProductionClientProtocol as Protocol

        port, ca, key, key_id, team, topic, payload, tokens, requests, in_flight = sys.argv[1:]
        Protocol.APNS_SERVER, Protocol.APNS_PORT = "localhost", int(port)
        message = json.load(open(payload))
        tokens = open(tokens).read().split()

        async def run():
            context = ssl.create_default_context(cafile=ca)
            apns = APNs(key=open(key).read(), key_id=key_id, team_id=team, topic=topic, ssl_context=context)
            answers = Counter()
            numbers = iter(range(int(requests)))

            async def send(number):
                request = NotificationRequest(device_token=tokens[number % len(tokens)], message=message,
                                              notification_id=str(uuid4()), push_type=PushType.ALERT)
                answers[(await apns.send_notification(request)).status] += 1

            async def work():
                for number in numbers:
                    await send(number)

            start = time.monotonic()
            await send(next(numbers))
            await asyncio.gather(*(work() for _ in range(int(in_flight))))
            seconds = time.monotonic() - start
            print(json.dumps({"seconds": seconds, "answers": answers, "connections": len(apns.pool.connections)}))

        asyncio.run(run())
        """#
}
