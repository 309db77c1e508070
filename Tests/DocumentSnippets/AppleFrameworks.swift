import Foundation

// What the snippets for apps use of UIKit and UserNotifications, with their signatures.

public final class UIApplication {}

public enum UIBackgroundFetchResult {
    case newData, noData, failed
}

open class UNNotificationServiceExtension {
    open func didReceive(
        _ request: UNNotificationRequest, withContentHandler contentHandler: @escaping (UNNotificationContent) -> Void
    ) {}
}

public final class UNNotificationRequest: Sendable {
    public var content: UNNotificationContent { UNNotificationContent() }
}

open class UNNotificationContent: @unchecked Sendable {
    public var userInfo: [AnyHashable: Any] { [:] }
    public func mutableCopy() -> Any { UNMutableNotificationContent() }
}

public final class UNMutableNotificationContent: UNNotificationContent, @unchecked Sendable {
    public var body = ""
    public var attachments: [UNNotificationAttachment] = []
}

public struct UNNotificationAttachment {
    public init(identifier: String, url: URL, options: [AnyHashable: Any]? = nil) throws {}
}
