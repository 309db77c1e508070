import FakeAPNs
import Foundation

/// The output for somebody who has started the server by hand.
struct Welcome {
    let text: String

    init(_ apns: FakeAPNs, _ files: TestAuthority, script: String?) throws {
        let token = String(repeating: "a1b2c3d4", count: 8)
        text = """
            A fake APNs listens at https://127.0.0.1:\(apns.port), and trusts nobody but this key:

              key      \(files.signingKeyFile), key id \(files.signingKey.id), team \(files.signingKey.team)
              CA       \(files.certificate), for your client to trust
              script   \(script ?? "none, so all is accepted: --script FILE, see docs/reference/fake-apns.md")

            Try it; the provider token is valid for an hour:

              curl --http2 --cacert \(files.certificate) -i -H 'apns-topic: com.example.app' -H 'apns-push-type: alert' \\
                -H 'authorization: bearer \(try files.providerToken())' \\
                -d '{"aps":{"alert":"Hello"}}' https://127.0.0.1:\(apns.port)/3/device/\(token)

            Ctrl-C ends it.
            """
    }
}
