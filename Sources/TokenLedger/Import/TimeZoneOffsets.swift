/// The offsets of a time zone, as the server knows them: a host or an image may have no time zones.
package enum TimeZoneOffsets {
    /// - Parameter name: As in `Asia/Tokyo`. `UTC+9` is none: PostgreSQL would read it as POSIX does, west of Greenwich.
    /// - Returns: From which second since 1970 each offset is in force, and its seconds east of UTC, since 2008. Empty if there is no
    ///   such zone.
    package static func read(
        _ name: String, on connection: inout Connection
    ) throws(DatabaseError) -> [(since: Int64, seconds: Int64)] {
        try connection.query(
            """
            WITH zone AS (
                SELECT z.name FROM pg_catalog.pg_timezone_names AS z WHERE lower(z.name) = lower($1) LIMIT 1
            ), sample AS (
                -- No zone has changed twice within an hour.
                SELECT t.at, extract(epoch FROM (t.at AT TIME ZONE z.name) - (t.at AT TIME ZONE 'UTC'))::bigint AS seconds
                FROM zone AS z, generate_series('2008-01-01 00:00:00+00', clock_timestamp() + interval '2 days', interval '1 hour') AS t (at)
            ), change AS (
                SELECT s.at, s.seconds FROM (SELECT n.at, n.seconds, lag(n.seconds) OVER (ORDER BY n.at) AS before FROM sample AS n) AS s
                WHERE s.seconds IS DISTINCT FROM s.before
            )
            -- At which second it was: some zones have changed at 00:01 of local time.
            SELECT extract(epoch FROM coalesce((
                SELECT min(e.at) FROM zone AS z, generate_series(c.at - interval '1 hour', c.at, interval '1 second') AS e (at)
                WHERE (e.at AT TIME ZONE z.name) - (e.at AT TIME ZONE 'UTC') = c.seconds * interval '1 second'), c.at))::bigint, c.seconds
            FROM change AS c ORDER BY c.at
            """, [.text(name)]
        ).decode { row throws(DatabaseError) in (since: try row.read(), seconds: try row.read()) }
    }
}
