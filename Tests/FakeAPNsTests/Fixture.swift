import FakeAPNs
import Foundation
import Synchronization

/// The keys that all tests here share: making them takes longer than most tests.
enum Fixture {
    static let authority: TestAuthority = {
        // A static value is never released, and its folder would stay.
        atexit { try? FileManager.default.removeItem(atPath: Fixture.authority.folder) }
        do {
            return try TestAuthority()
        } catch {
            fatalError("\(error)")
        }
    }()

    /// A valid `authorization`.
    static func bearer(issuedAt: Int64? = nil) throws -> String {
        "bearer " + (try authority.providerToken(issuedAt: issuedAt))
    }

    /// A valid request with the changes of a test.
    static func request(_ change: (inout CurlRequest) -> Void = { _ in }) throws -> CurlRequest {
        var request = CurlRequest()
        request.authorization = try bearer()
        change(&request)
        return request
    }
}

extension FakeAPNs {
    func send(_ request: CurlRequest) throws -> CurlRequest.Answer {
        try request.send(to: port, trusting: Fixture.authority)
    }
}

/// A clock that only a test advances.
final class HandClock: Sendable {
    private let milliseconds = Atomic<Int64>(1_795_000_000_000)

    var now: Int64 { milliseconds.load(ordering: .acquiring) }

    func advance(seconds: Int64) { milliseconds.add(seconds * 1000, ordering: .acquiringAndReleasing) }
}
