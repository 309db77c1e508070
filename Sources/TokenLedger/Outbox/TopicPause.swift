/// What a person does to the sending to a topic.
public enum TopicPause: Sendable {
    case pause(reason: String)
    case resume

    /// - Returns: Whether that changed anything: not if the topic was paused already, or by nobody.
    public func apply(
        to topic: String, environment: String, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        switch self {
        case .pause(let reason):
            try connection.query(
                "SELECT tokenkeeper.pause_sending($1, $2, $3)", [.text(topic), .text(environment), .text(reason)]
            ).value(Bool.self)
        case .resume:
            try connection.query("SELECT tokenkeeper.resume_sending($1, $2)", [.text(topic), .text(environment)])
                .value(Bool.self)
        }
    }
}
