/// An SQL expression: an instant for people, to the second, as in `2026-11-06 20:00:00 UTC`.
func inUTC(_ instant: String) -> String {
    "to_char(\(instant) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS \"UTC\"')"
}
