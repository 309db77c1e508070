/// The SQL of a plan: what `migrate` runs and `migrate --print` prints.
struct MigrationScript {
    let plan: MigrationPlan
    let grants: Repeatable
    let checksums: [String: String]
    let release: Version

    /// Until the lock is held, another migrator may take its time. A statement may take as long as it needs.
    static let transaction = BatchTransaction(lockTimeout: .seconds(60), statementTimeout: .zero, isDurable: true)

    /// With two migrators, one waits here. From then on, no lock of an application is waited for at length.
    static let lock = "\(DrainLock.migration); SET LOCAL lock_timeout = '5s';"

    /// GRANT and TRUNCATE both change the catalog's row of a partition: at once, the later one fails ("tuple concurrently updated"). Senders
    /// and batches do not wait for this lock.
    static let keepPartitions =
        "LOCK TABLE tokenkeeper.send_result, tokenkeeper.registration IN SHARE UPDATE EXCLUSIVE MODE;"

    /// As `SchemaOwner.check`.
    private static let ownerCheck = """
        DO $$
        DECLARE
            owner CONSTANT text := \(SchemaOwner.sql);
        BEGIN
            IF owner <> current_user THEN
                RAISE EXCEPTION 'the schema tokenkeeper belongs to the role %, and % would own the functions that it creates', owner, current_user
                    USING HINT = 'Run this as ' || owner || ', or print it again with --owner ' || owner || '.';
            END IF;
        END
        $$;
        """

    /// An expression: a digest of what the schema says was applied.
    static let fingerprint = """
        encode(sha256(convert_to(concat_ws(';',
            (SELECT string_agg(concat_ws(' ', m.version, m.name, m.checksum), ',' ORDER BY m.version) FROM tokenkeeper.migration AS m),
            (SELECT string_agg(concat_ws(' ', r.name, r.checksum, r.release), ',' ORDER BY r.name) FROM tokenkeeper.repeatable AS r)),
            'UTF8')), 'hex')
        """

    /// In the order in which they are run, each one or several statements.
    var statements: [String] {
        var parts: [String] = []
        for version in plan.versions { parts += [version.sql, record(version)] }
        if plan.rights == .apply || !plan.repeatables.isEmpty { parts.append(Self.keepPartitions) }
        parts += plan.repeatables.map(\.sql)
        if plan.rights == .apply { parts.append(grants.sql) }
        parts += record()
        return parts
    }

    private func record(_ version: Migration) -> String {
        let values = [
            "\(version.version)", SQLLiteral.quoted(version.name), SQLLiteral.quoted(checksums[version.file] ?? ""),
            SQLLiteral.quoted(version.oldestDaemon.description),
        ]
        return """
            INSERT INTO tokenkeeper.migration (version, name, checksum, oldest_daemon)
            VALUES (\(values.joined(separator: ", ")));
            """
    }

    private func record() -> [String] {
        let files = plan.repeatables + (plan.rights == .apply ? [grants] : [])
        if files.isEmpty { return [] }
        let rows = files.map {
            "(\(SQLLiteral.quoted($0.name)), \(SQLLiteral.quoted(checksums[$0.name] ?? "")), \(SQLLiteral.quoted(release.description)))"
        }
        let gone = "DELETE FROM tokenkeeper.repeatable WHERE name <> \(SQLLiteral.quoted(grants.name));"
        return (plan.repeatables.isEmpty ? [] : [gone]) + [
            """
            INSERT INTO tokenkeeper.repeatable (name, checksum, release)
            VALUES
                \(rows.joined(separator: ",\n    "))
            ON CONFLICT (name) DO UPDATE
            SET checksum = excluded.checksum, release = excluded.release, applied_at = clock_timestamp(), applied_by = session_user;
            """
        ]
    }

    private static func quoted(_ role: String) -> String { "\"\(role.replacing("\"", with: "\"\""))\"" }

    /// As the login again. Only if the owner has it: on PostgreSQL 16, another administrator may not alter the role.
    private static func takeRoleCreation(from owner: String) -> String {
        """
        RESET ROLE;
        DO $$
        BEGIN
            IF (SELECT r.rolcreaterole FROM pg_catalog.pg_roles AS r WHERE r.rolname = \(SQLLiteral.quoted(owner))) THEN
                EXECUTE format('ALTER ROLE %I NOCREATEROLE', \(SQLLiteral.quoted(owner)));
            END IF;
        END
        $$;
        """
    }

    /// For psql: the whole transaction.
    ///
    /// - Parameters:
    ///   - found: The schema's fingerprint when the plan was made; nil if there was no schema.
    ///   - owner: The role to work as, if not the login role.
    func text(for found: String?, owner: String?) -> String {
        let begin = Self.transaction.begin.split(separator: "\n").joined(separator: "\n")
        var parts = ["-- tokenkeeperd \(release): run this with psql.\n\\set ON_ERROR_STOP on", begin]
        if let owner {
            // As the login: the owner needs no right to create roles.
            if plan.rights == .apply { parts.append(Grants.creation) }
            parts.append("SET LOCAL ROLE \(Self.quoted(owner));")
        }
        if plan.createsObjects { parts.append(Self.ownerCheck) }
        if let found {
            parts.append(Self.lock)
            parts.append(
                """
                DO $$
                BEGIN
                    IF \(Self.fingerprint) <> \(SQLLiteral.quoted(found)) THEN
                        RAISE EXCEPTION 'the schema has changed since this script was printed' USING HINT = 'Run tokenkeeperd migrate --print again.';
                    END IF;
                END
                $$;
                """)
        }
        let end = owner.map { plan.rights == .apply ? [Self.takeRoleCreation(from: $0)] : [] } ?? []
        return (parts + statements + end + ["COMMIT;"]).joined(separator: "\n\n") + "\n"
    }
}
