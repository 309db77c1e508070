/// A leaf of the queue, in the terms of migration 0002.
struct Partition {
    let number: Int
    var table: String { "tokenkeeper.send_result_\(number)" }

    static func current(_ session: Session) throws -> Partition {
        Partition(number: Int(try session.number("SELECT (date_part('epoch', clock_timestamp())::bigint >> 7) & 7")))
    }

    /// The leaf before the one before the current one: no sender writes to it any more, and the daemon knows that.
    static func past(_ session: Session) throws -> Partition {
        Partition(number: (try current(session).number + 6) % 8)
    }
}
