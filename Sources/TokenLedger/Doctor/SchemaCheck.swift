/// Whether the schema fits this binary.
public enum SchemaCheck {
    /// - Returns: A finding, and whether the other checks make sense.
    public static func finding(
        daemon: Version, on connection: inout Connection
    ) throws(DatabaseError) -> (finding: Finding, fits: Bool) {
        do {
            let plan = try Migrator(daemon: daemon).plan(&connection)
            if plan.createsObjects {
                let words = "\(SchemaError.notMigrated(plan))".split(separator: ": run `").first.map(String.init) ?? ""
                return (Finding(.problem, "schema", words, fixedBy: ["tokenkeeperd migrate"]), false)
            }
            if plan.rights == .apply {
                let words = "the rights are those of another release, or were granted by hand from --print"
                return (Finding(.note, "schema", words), true)
            }
            return (Finding(.passed, "schema", "fits tokenkeeperd \(daemon)"), true)
        } catch let error as SchemaError {
            return (Finding(.problem, "schema", "\(error)", fixedBy: ["tokenkeeperd migrate --dry-run"]), false)
        } catch let error as DatabaseError where error.sqlState == "42501" {
            let grant = try connection.query(
                """
                SELECT CASE WHEN to_regrole('tokenkeeper_reader') IS NULL THEN 'tokenkeeperd grants'
                    ELSE format('GRANT tokenkeeper_reader TO %I;', current_user) END
                """
            ).value(String.self)
            return (
                Finding(
                    .problem, "schema", "this role may not look into it",
                    fixedBy: [grant]), false
            )
        } catch let error as DatabaseError {
            throw error
        } catch {
            throw DatabaseError(.unexpectedRow, "\(error)")
        }
    }
}
