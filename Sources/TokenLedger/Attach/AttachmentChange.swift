/// An attached table that has broken, works again, or could not queue a change of its rows.
public struct AttachmentChange: Equatable, Sendable {
    /// The schema and name of the table.
    public let table: String
    /// Why its changes do not arrive; nil if they do.
    public let fault: String?
    /// The fault that was known before.
    public let was: String?
    /// How many changes could not be queued since the last look.
    public let failures: Int64
    /// The error of the last of them.
    public let failure: String?

    /// Looks at all attached tables, for the view `status`.
    ///
    /// - Returns: What has changed since any daemon last looked. Empty also while another session looks.
    public static func noticeNew(on connection: inout Connection) throws(DatabaseError) -> [AttachmentChange] {
        try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.query(
                "SELECT c.name, c.fault, c.was, coalesce(c.failures, 0), c.failure FROM tokenkeeper.check_attachments() AS c"
            ).decode { row throws(DatabaseError) in
                AttachmentChange(
                    table: try row.read(), fault: try row.read(), was: try row.read(), failures: try row.read(),
                    failure: try row.read())
            }
        }
    }
}
