/// A session whose lock on a table of the schema can block the daemon.
public struct LockHolder: Hashable, Sendable {
    /// How it blocks.
    public enum Kind: String, Sendable, ColumnDecodable {
        /// It has locked the whole table against changes.
        case table
        /// It waits for such a lock, and all other sessions queue behind it.
        case queued
        /// It has changed or locked rows in a transaction that is still open: perhaps the rows that the daemon needs.
        case rows
        /// It is a daemon that reads a whole partition of a queue. The lock ends with the read.
        case reading
    }

    /// Whether no other session can change the table.
    public var isOfWholeTable: Bool { kind == .table || kind == .queued }

    public let kind: Kind
    /// Nil for a prepared transaction.
    public let pid: Int32?
    /// The virtual transaction, which is the same as long as the transaction lasts.
    let transaction: String
    /// Without the schema's name.
    public let table: String
    /// As in SQL, such as `SHARE`.
    public let mode: String
    /// Nil for a background process of the server.
    public let role: String?
    /// Its application_name; nil if it is not set.
    public let application: String?
    /// When its transaction began, or was prepared. Nil unless it was prepared, or the daemon is the same role, or a member of it or of `pg_read_all_stats`.
    public let since: String?
    /// The sessions that a queued one waits for, in words.
    public let behind: String?
    /// The name of a prepared transaction: the argument of COMMIT PREPARED.
    public var prepared: String? = nil

    /// The session, in words.
    public var who: String {
        guard let pid else {
            return "prepared transaction '\(prepared ?? "")'" + (role.map { ", role \($0)" } ?? "")
                + (since.map { ", since \($0)" } ?? "") + " (see pg_prepared_xacts)"
        }
        return Self.who(pid: "\(pid)", role: role, application: application)
            + (since.map { ", in a transaction since \($0)" } ?? "")
    }

    private static func who(pid: String, role: String?, application: String?) -> String {
        "pid \(pid)" + (role.map { ", role \($0)" } ?? "") + (application.map { ", application \($0)" } ?? "")
    }

    /// The table and who holds it, in words.
    public var words: String {
        switch kind {
        case .table: "tokenkeeper.\(table) is locked (\(mode)) by \(who)"
        case .rows: "rows of tokenkeeper.\(table) may be locked by \(who)"
        case .reading: "tokenkeeper.\(table) is being read by another daemon, \(who)"
        case .queued: "\(who) waits for tokenkeeper.\(table) (\(mode))" + (behind.map { " behind \($0)" } ?? "")
        }
    }

    /// Identifies a lock across looks.
    public struct Identity: Hashable, Sendable {
        let pid: Int32?
        let transaction: String
        let kind: Kind
    }

    public var identity: Identity { Identity(pid: pid, transaction: transaction, kind: kind) }

    /// `ShareRowExclusiveLock` is SHARE ROW EXCLUSIVE in SQL.
    static func sqlName(ofMode mode: String) -> String {
        var name = ""
        for letter in mode.hasSuffix("Lock") ? mode.dropLast(4) : mode[...] {
            if letter.isUppercase, !name.isEmpty { name += " " }
            name += letter.uppercased()
        }
        return name
    }
}

extension [LockHolder] {
    /// The sessions, in words; the first three of many.
    public var words: String {
        if isEmpty { return "no session holds one for long" }
        let more = count > 3 ? "; and \(count - 3) more" : ""
        return prefix(3).map(\.words).joined(separator: "; ") + more
    }
}

extension LockHolder {
    /// Whose way a lock of rows can be in.
    public enum Work: Sendable {
        case drain, send

        /// The tables whose rows the work shares with applications and operators.
        fileprivate var sharedRows: [String] {
            switch self {
            case .drain: ["ledger", "topic", "tripped_guard", "receipt"]
            case .send:
                [
                    "send_request", "campaign", "campaign_batch", "paused_topic", "background_send", "topic_rate",
                    "alert_send",
                ]
            }
        }
    }

    /// The queues.
    private static let queues = QueueName.allCases.map(\.rawValue)

    /// The queues and their partitions.
    private static let queueTables =
        queues
        + QueueName.allCases.flatMap(\.partitions).map { "\($0.table.dropFirst("tokenkeeper.".count))" }

    /// All other sessions whose locks on tables of the schema conflict with changing rows, with one lock each. Sessions that lock
    /// a whole table come first.
    ///
    /// Any role may call this. It locks no table of the schema and takes some milliseconds at most.
    public static func all(
        inTheWayOf work: Work = .drain, on connection: inout Connection
    ) throws(DatabaseError) -> [LockHolder] {
        let who =
            "concat_ws(', ', 'pid ' || b.pid, 'role ' || b.usename, 'application ' || nullif(b.application_name, ''))"
        return try connection.query(
            """
            WITH lock AS MATERIALIZED (
                SELECT l.pid, l.virtualtransaction, l.transactionid, l.mode, l.granted, l.locktype, r.table_name
                FROM pg_catalog.pg_locks AS l
                LEFT JOIN (
                    SELECT c.oid, coalesce(t.relname, c.relname)::text AS table_name
                    FROM pg_catalog.pg_class AS c
                    LEFT JOIN pg_catalog.pg_index AS i ON i.indexrelid = c.oid
                    LEFT JOIN pg_catalog.pg_class AS t ON t.oid = i.indrelid
                    WHERE c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper')
                ) AS r ON l.locktype = 'relation' AND r.oid = l.relation
                      AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
                WHERE l.pid IS DISTINCT FROM pg_backend_pid() AND (r.oid IS NOT NULL OR l.locktype = 'transactionid')
            ), session AS (
                SELECT l.pid, l.virtualtransaction,
                       count(*) FILTER (WHERE l.locktype = 'transactionid' AND l.granted) > 0 AS has_changed,
                       (array_agg(l.transactionid) FILTER (WHERE l.locktype = 'transactionid' AND l.granted))[1] AS transactionid,
                       -- Nobody but lock_partition takes both.
                       count(*) FILTER (WHERE l.table_name = 'lock_drain' AND l.mode = 'RowShareLock' AND l.granted) > 0
                       AND count(*) FILTER (WHERE l.table_name = ANY ($2) AND l.granted
                                              AND l.mode IN ('ExclusiveLock', 'AccessExclusiveLock')) > 0 AS is_reading,
                       -- An INSERT locks the queue and the partition of the time. What changes rows through the queue locks all partitions.
                       count(*) FILTER (WHERE l.table_name = ANY ($4) AND l.mode = 'RowExclusiveLock') > 0
                       AND count(*) FILTER (WHERE l.table_name IN ('send_result_retry', 'registration_retry')) = 0
                       AND count(*) FILTER (WHERE l.table_name = ANY ($2) AND l.mode = 'RowShareLock') = 0 AS only_queues
                FROM lock AS l GROUP BY l.pid, l.virtualtransaction
            )
            SELECT f.kind, f.pid, f.virtualtransaction, f.table_name, f.mode, coalesce(a.usename, x.owner)::text, nullif(a.application_name, ''),
                   to_char(coalesce(a.xact_start, x.prepared) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
                   CASE f.kind WHEN 'queued' THEN (
                       SELECT string_agg(\(who), ' and ' ORDER BY b.pid) FROM pg_catalog.pg_stat_activity AS b
                       WHERE b.pid = ANY (pg_blocking_pids(f.pid)) AND b.pid <> pg_backend_pid()) END,
                   left(x.gid, 60)
            FROM (
                SELECT DISTINCT ON (k.pid, k.virtualtransaction) k.*
                FROM (
                    SELECT l.pid, l.virtualtransaction, s.transactionid, l.mode, l.table_name,
                           CASE WHEN s.is_reading THEN 'reading'
                                WHEN l.mode IN ('RowShareLock', 'RowExclusiveLock') THEN 'rows'
                                WHEN l.granted THEN 'table' ELSE 'queued' END AS kind
                    FROM lock AS l
                    JOIN session AS s ON s.virtualtransaction = l.virtualtransaction AND s.pid IS NOT DISTINCT FROM l.pid
                    WHERE l.table_name IS NOT NULL
                      AND (l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
                           OR l.granted AND l.mode IN ('RowShareLock', 'RowExclusiveLock') AND s.has_changed
                              AND (l.table_name = ANY ($1) OR l.table_name = ANY ($2) AND NOT s.only_queues))
                ) AS k
                ORDER BY k.pid, k.virtualtransaction, array_position($3, k.kind),
                         k.mode IN ('RowShareLock', 'RowExclusiveLock'), coalesce(array_position($1, k.table_name), 99), k.table_name
            ) AS f
            LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = f.pid
            LEFT JOIN pg_catalog.pg_prepared_xacts AS x ON f.pid IS NULL AND x.transaction = f.transactionid
            ORDER BY array_position($3, f.kind), f.pid
            LIMIT 100
            """,
            [
                .texts(work.sharedRows), .texts(Self.queueTables), .texts(["table", "queued", "rows", "reading"]),
                .texts(Self.queues),
            ]
        ).decode { row throws(DatabaseError) in
            LockHolder(
                kind: try row.read(), pid: try row.read(), transaction: try row.read(), table: try row.read(),
                mode: sqlName(ofMode: try row.read()), role: try row.read(), application: try row.read(),
                since: try row.read(), behind: try row.read(), prepared: try row.read())
        }
    }
}
