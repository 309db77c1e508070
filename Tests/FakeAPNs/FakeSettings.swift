import NIOHTTP2

/// The values of a SETTINGS frame; nil for those that it does not contain.
public struct FakeSettings: Sendable, Equatable {
    /// When they are sent, counted from the beginning of the connection. Zero for the first SETTINGS frame.
    public var after: Duration
    /// SETTINGS_MAX_CONCURRENT_STREAMS.
    public var maximumStreams: Int?
    /// SETTINGS_INITIAL_WINDOW_SIZE in bytes: how much of a body a client may send before the server renews the window. The
    /// server renews it when half of it is used; with 0, never. It also applies to open streams.
    public var initialWindow: Int?

    public init(after: Duration = .zero, maximumStreams: Int? = nil, initialWindow: Int? = nil) {
        self.after = after
        self.maximumStreams = maximumStreams
        self.initialWindow = initialWindow
    }

    /// Takes the values that the other one contains.
    mutating func merge(_ other: FakeSettings) {
        maximumStreams = other.maximumStreams ?? maximumStreams
        initialWindow = other.initialWindow ?? initialWindow
    }

    var frame: [HTTP2Setting] {
        var frame: [HTTP2Setting] = []
        if let maximumStreams { frame.append(HTTP2Setting(parameter: .maxConcurrentStreams, value: maximumStreams)) }
        if let initialWindow { frame.append(HTTP2Setting(parameter: .initialWindowSize, value: initialWindow)) }
        return frame
    }
}

extension FakeAPNs {
    /// Sends a SETTINGS frame on each open connection. New connections begin with these settings.
    public func change(_ settings: FakeSettings) {
        core.settings.withLock { $0.merge(settings) }
        for channel in core.connections.withLock({ Array($0.values) }) {
            channel.eventLoop.execute {
                try? channel.pipeline.syncOperations.handler(type: FakeConnection.self).change(settings)
            }
        }
    }
}
