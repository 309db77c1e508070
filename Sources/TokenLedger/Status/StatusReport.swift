/// The row of the view `tokenkeeper.status`, for people and for programs.
public struct StatusReport: Sendable {
    /// One object of JSON, in the view's order and with its names. Ages are in seconds.
    public let json: String
    /// Names and values in the view's order, without nulls. Instants are in UTC.
    public let fields: [(name: String, value: String)]
    public let warnings: [String]

    private static let source = """
        (SELECT s.queue_depth, s.queue_depth_estimated,
                extract(epoch FROM s.oldest_result_age)::bigint AS oldest_result_age,
                s.queue_as_of, s.rejected, s.held, s.tokens_active, s.tokens_stale, s.tokens_suspect, s.tokens_superseded,
                s.tokens_unregistered_by_app, s.tokens_as_of, s.last_sweep_at, s.last_sweep_trigger, s.last_sweep_outcome,
                s.live_daemons, s.warnings
         FROM tokenkeeper.status AS s)
        """

    public init(on connection: inout Connection) throws(DatabaseError) {
        json = try connection.run("SET LOCAL timezone = 'UTC'; SELECT row_to_json(s) FROM \(Self.source) AS s").value()
        fields = try connection.run(
            """
            SET LOCAL timezone = 'UTC';
            SELECT f.key, CASE WHEN f.key LIKE '%_as_of' OR f.key = 'last_sweep_at'
                               THEN to_char(f.value::timestamptz, 'YYYY-MM-DD HH24:MI:SS "UTC"') ELSE f.value END
            FROM \(Self.source) AS s, json_each_text(row_to_json(s)) AS f
            WHERE f.value IS NOT NULL AND f.key <> 'warnings'
            """
        ).decode { row throws(DatabaseError) in (name: try row.read(), value: try row.read()) }
        warnings = try connection.query("SELECT unnest(warnings) FROM tokenkeeper.status").values()
    }
}
