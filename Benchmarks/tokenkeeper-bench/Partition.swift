/// A partition of the queue: see migrations/versions/0004_queue.sql.
struct Partition {
    let number: Int
    var table: String { "tokenkeeper.send_result_\(number)" }

    static func current(_ session: Session) throws -> Partition {
        Partition(number: Int(try session.number("SELECT (date_part('epoch', clock_timestamp())::bigint >> 7) & 7")))
    }

    /// The second partition before the current one: no sender writes to it any more, and the daemon treats it as sealed.
    static func past(_ session: Session) throws -> Partition {
        Partition(number: (try current(session).number + 6) % 8)
    }
}
