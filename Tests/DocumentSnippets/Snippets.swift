// swift-format-ignore-file
import FakeAPNs
import Foundation

// Every Swift snippet of the documents, verbatim except for the indentation. The build compiles them, and `Swift snippets of documents`
// in DocumentTests.swift compares them with the documents.

// Apps --------------------------------------------------------------------------------------------------------------------

struct Message {
    var text = ""
    var pictureFile: URL?
}

final class Messages: Sendable {
    static let shared = Messages()
    @discardableResult func fetch(_ id: String) async throws -> Message { Message() }
}

final class AppDelegate {
    func application(
        _ application: UIApplication, didReceiveRemoteNotification userInfo: [AnyHashable: Any]
    ) async -> UIBackgroundFetchResult {
        guard let id = userInfo["message_id"] as? String else { return .noData }
        do {
            try await Messages.shared.fetch(id)
            return .newData
        } catch {
            return .failed
        }
    }
}

final class NotificationService: UNNotificationServiceExtension {
    override func didReceive(
        _ request: UNNotificationRequest, withContentHandler show: @escaping (UNNotificationContent) -> Void
    ) {
        guard let content = request.content.mutableCopy() as? UNMutableNotificationContent,
              let id = content.userInfo["message_id"] as? String
        else { return show(request.content) }
        Task {
            if let message = try? await Messages.shared.fetch(id) {
                content.body = message.text
                if let picture = message.pictureFile,
                   let attachment = try? UNNotificationAttachment(identifier: id, url: picture)
                {
                    content.attachments = [attachment]
                }
            }
            show(content)
        }
    }
}

// The fake APNs -----------------------------------------------------------------------------------------------------------

func inATest() throws {
    let apns = try FakeAPNs.start(FakeOptions(TestAuthority())) { request in   // port 0: apns.port has the real one
        request.ordinal % 10 == 0 ? .refused(429, "TooManyRequests") : nil     // nil: accepted, unless the token is dead
    }
    apns.deaths.die("a1b2c3d4", .init(at: 1_508_249_865_488))
    // … send …
    apns.change(.init(initialWindow: 65_535))   // SETTINGS on all connections
    print(apns.records.outcomes)    // by status and reason; also each request, connections, streams at once
    print(apns.records.identifiers) // how often each apns-id was processed; refusals: how often it was refused
    apns.stop()
}
