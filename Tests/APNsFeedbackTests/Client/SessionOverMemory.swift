import TokenModel

@testable import APNsFeedback

/// A session whose other end is the test: bytes go in and come out.
struct SessionOverMemory {
    let session = HTTP2Session()
    private var output = OutputBuffer()
    private var reader = FrameReader()
    private var headers = RequestHeaders()
    private var indexed: RequestHeaders.Indexed = []
    private(set) var events: [SessionEvent] = []

    /// - Parameter settings: What the server says first; nil to leave it out.
    init(settings: [(Frames.Setting, UInt32)]? = []) throws {
        if let settings { try receive(Frames.settings(settings)) }
        events = []
    }

    mutating func open(_ request: PushRequest = request(), authorization: String? = nil) -> Int32? {
        headers.write(request, authority: Array("h".utf8), authorization: authorization, indexed: &indexed)
        return session.open(headers, payload: request.payload, slot: request.slot)
    }

    mutating func receive(_ bytes: [UInt8]) throws {
        defer { events += session.takeEvents() }
        try bytes.withUnsafeBufferPointer { try session.receive($0) }
    }

    /// The events so far.
    mutating func takeEvents() -> [SessionEvent] {
        defer { events = [] }
        return events
    }

    /// - Returns: The frames that the client sends now, and the streams whose requests end with them.
    mutating func send(atLeast limit: Int = 1 << 20) throws -> (frames: [FrameReader.Frame], ends: [Int32]) {
        defer { events += session.takeEvents() }
        try session.produce(into: &output, atLeast: limit)
        let bytes = output.withBytes { Array($0) }
        let ends = output.remove(bytes.count)
        return (reader.add(bytes), ends)
    }
}
