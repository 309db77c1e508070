import Foundation
import LedgerTestSupport
import Synchronization

/// A disturbance in the database while the daemon drains. It lasts as long as the object.
final class Disturbance {
    enum Kind: String, CaseIterable {
        case oldSnapshot = "a transaction holds xmin"
        case dump = "a dump is running"
        case sleepingWriter = "a writer sleeps in its transaction"
    }

    private let session: Session
    private let stop = Flag()
    private let dumping = DispatchGroup()

    init(_ kind: Kind, on database: Database, partition: Partition) throws {
        session = try database.session()
        switch kind {
        case .oldSnapshot:
            // It locks nothing of the queue, but dead rows stay.
            try session.run(
                "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id(), count(*) FROM tokenkeeper.topic")
        case .dump:
            // A dump locks all tables while it runs. Repeated dumps alone would leave gaps.
            try session.run(
                """
                BEGIN;
                DO $$
                DECLARE
                    of_schema text;
                BEGIN
                    FOR of_schema IN SELECT c.oid::regclass FROM pg_class AS c
                        WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p')
                    LOOP
                        EXECUTE 'LOCK TABLE ' || of_schema || ' IN ACCESS SHARE MODE';
                    END LOOP;
                END
                $$
                """)
            let address = database.url(user: "postgres")
            DispatchQueue.global().async(group: dumping) { [stop] in
                while !stop.isUp {
                    let dump = try? ProgramRun(["sh", "-c", "exec pg_dump -Fc -Z0 -d \"$0\" >/dev/null", address])
                    if dump?.status != 0, !stop.isUp { Progress.say("pg_dump: \(dump?.errors ?? "does not start")") }
                }
            }
        case .sleepingWriter:
            try session.run(
                "BEGIN; INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) VALUES ('late', 'aa', 200, \(partition.number))"
            )
        }
    }

    deinit {
        stop.raise()
        try? session.run("ROLLBACK")
        dumping.wait()
    }

    private final class Flag: Sendable {
        private let value = Atomic(false)
        var isUp: Bool { value.load(ordering: .relaxed) }
        func raise() { value.store(true, ordering: .relaxed) }
    }
}
