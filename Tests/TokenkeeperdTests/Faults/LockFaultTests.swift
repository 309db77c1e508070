import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

/// A lock of another session that keeps results or requests waiting. `{pid}` stands for the holder's process, `{now}` for the current
/// partition of the queue.
struct LockFault: Sendable, CustomTestStringConvertible {
    var testDescription: String
    /// What the holder does in a transaction that stays open.
    var taking: String
    /// Whether the holder prepares the transaction, and leaves.
    var isPrepared = false
    /// What a second session waits for behind the holder.
    var waiting: String?
    /// What all three outputs say.
    var cause: String

    static let ofTheDrain = [
        // VACUUM FULL takes the same lock. It keeps the view from being read, too.
        LockFault(
            testDescription: "the ledger, against reading", taking: "LOCK TABLE tokenkeeper.ledger",
            cause: "tokenkeeper.ledger is locked (ACCESS EXCLUSIVE) by {holder}"),
        // CREATE INDEX takes the same lock.
        LockFault(
            testDescription: "the ledger, against changes", taking: "LOCK TABLE tokenkeeper.ledger IN SHARE MODE",
            cause: "tokenkeeper.ledger is locked (SHARE) by {holder}"),
        LockFault(
            testDescription: "the row of one token",
            taking: "UPDATE tokenkeeper.ledger SET tags = tags WHERE token_key = '\\xaa'",
            cause: "rows of tokenkeeper.ledger may be locked by {holder}"),
        LockFault(
            testDescription: "rows, by a prepared transaction", taking: "UPDATE tokenkeeper.ledger SET tags = tags",
            isPrepared: true,
            cause: "rows of tokenkeeper.ledger may be locked by prepared transaction '{gid}', role owner, since 20"),
        LockFault(
            testDescription: "a table, by a prepared transaction",
            taking: "LOCK TABLE tokenkeeper.token_event_log IN EXCLUSIVE MODE; SELECT pg_current_xact_id()",
            isPrepared: true,
            cause:
                "tokenkeeper.token_event_log is locked (EXCLUSIVE) by prepared transaction '{gid}', role owner, since 20"
        ),
        LockFault(
            testDescription: "a partition of the queue", taking: "LOCK TABLE tokenkeeper.send_result_{now}",
            cause: "tokenkeeper.send_result_{now} is locked (ACCESS EXCLUSIVE) by {holder}"),
        LockFault(
            testDescription: "the counts", taking: "LOCK TABLE tokenkeeper.result_count IN EXCLUSIVE MODE",
            cause: "tokenkeeper.result_count is locked (EXCLUSIVE) by {holder}"),
        LockFault(
            testDescription: "the topics", taking: "LOCK TABLE tokenkeeper.topic IN ACCESS EXCLUSIVE MODE",
            cause: "tokenkeeper.topic is locked (ACCESS EXCLUSIVE) by {holder}"),
        LockFault(
            testDescription: "two tables",
            taking: "LOCK TABLE tokenkeeper.send_result_retry, tokenkeeper.ledger IN EXCLUSIVE MODE",
            cause: "tokenkeeper.ledger is locked (EXCLUSIVE) by {holder}"),
        LockFault(
            testDescription: "release_held in an open transaction",
            taking:
                "SELECT tokenkeeper.ensure_topic('production', 'locked'); SELECT tokenkeeper.release_held('locked')",
            cause: "tokenkeeper.lock_drain is locked (EXCLUSIVE) by {holder}"),
        LockFault(
            testDescription: "an ALTER TABLE behind a long reader", taking: "SELECT count(*) FROM tokenkeeper.ledger",
            waiting: "ALTER TABLE tokenkeeper.ledger ADD CHECK (true) NOT VALID",
            cause: "waits for tokenkeeper.ledger (ACCESS EXCLUSIVE) behind {holder}"),
        LockFault(
            testDescription: "the table of heartbeats", taking: "LOCK TABLE tokenkeeper.daemon IN SHARE MODE",
            cause: "tokenkeeper.daemon is locked (SHARE) by {holder}"),
    ]

    static let ofTheSender = [
        LockFault(
            testDescription: "the rows of requests", taking: "SELECT FROM tokenkeeper.send_request FOR UPDATE",
            cause: "rows of tokenkeeper.send_request may be locked by {holder}"),
        LockFault(
            testDescription: "the table of requests", taking: "LOCK TABLE tokenkeeper.send_request IN EXCLUSIVE MODE",
            cause: "tokenkeeper.send_request is locked (EXCLUSIVE) by {holder}"),
        LockFault(
            testDescription: "the paused topics, against reading", taking: "LOCK TABLE tokenkeeper.paused_topic",
            cause: "tokenkeeper.paused_topic is locked (ACCESS EXCLUSIVE) by {holder}"),
    ]
}

@Suite(.ownThread) struct `A lock of another session is in the log, in Status and in the view until it is gone` {
    private func hold(
        _ fault: LockFault, in stage: FaultStage, while work: (_ cause: String) throws -> Void
    ) throws {
        let gid = "index of \(stage.database.name)"
        var holder = try stage.database.connect()
        let pid = try #require(try holder.scalar("SELECT pg_backend_pid()"))
        let partition = try holder.scalar("SELECT \(Partition.currentInSQL)") ?? ""
        func text(_ text: String) -> String {
            text.replacing("{now}", with: partition).replacing("{gid}", with: gid)
                .replacing("{holder}", with: "pid \(pid), role owner, application index builder")
        }
        try holder.execute("SET application_name = 'index builder'; BEGIN; \(text(fault.taking))")
        if fault.isPrepared { try holder.execute("PREPARE TRANSACTION '\(gid)'") }
        let waiter = try fault.waiting.map { try wait(for: $0, in: stage.database) }
        try work(text(fault.cause))
        try holder.execute(fault.isPrepared ? "ROLLBACK PREPARED '\(gid)'" : "ROLLBACK")
        waiter?.wait()
    }

    /// Runs a statement in another session, and returns once it waits for a lock.
    private func wait(for statement: String, in database: TestDatabase) throws -> DispatchSemaphore {
        let ended = DispatchSemaphore(value: 0)
        Thread.detachNewThread {
            _ = try? TestCluster.run(["psql", "-XAtq", "-d", database.url(user: "owner"), "-c", statement])
            ended.signal()
        }
        try eventually("it waits") {
            try database.psql(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'tokenkeeper.ledger'::regclass") == "1"
        }
        return ended
    }

    @Test(arguments: LockFault.ofTheDrain) func `that keeps results waiting`(_ fault: LockFault) throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.queueResults()
        try hold(fault, in: stage) { cause in
            try stage.start()
            try stage.reports(cause)
            #expect(stage.log.contains("level=warning msg=\"waiting for a lock in PostgreSQL\""))
            try eventually("the status says since when") { stage.status.contains(" (since 20") }
        }
        try eventually("the log says that it is over") {
            stage.log.contains("level=notice msg=\"no longer waiting for a lock in PostgreSQL\"")
        }
        try stage.isOver(fault.testDescription)
        #expect(try stage.database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "2")
        stage.stop()
    }

    @Test(arguments: LockFault.ofTheSender) func `that keeps requests waiting`(_ fault: LockFault) throws {
        let sending = try SendingStage()
        defer { sending.apns.stop() }
        let stage = try FaultStage(sending.database)
        try sending.register(1...3)
        try sending.enqueue()
        try hold(fault, in: stage) { cause in
            try stage.start(sending.servers + sending.key, environment: ["RUNTIME_DIRECTORY": sending.runtime.path])
            try stage.reports(cause)
        }
        try sending.settled()
        try eventually("the log says that it is over") {
            stage.log.contains("no longer waiting for a lock in PostgreSQL")
        }
        try stage.isOver("locked by")
        stage.stop()
    }

    @Test func `that makes a sweep fail`() throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.start()
        let fault = LockFault(
            testDescription: "", taking: "LOCK TABLE tokenkeeper.rejected_result IN EXCLUSIVE MODE",
            cause: "tokenkeeper.rejected_result is locked (EXCLUSIVE) by {holder}")
        try hold(fault, in: stage) { cause in
            try stage.database.psql("SELECT tokenkeeper.request_sweep()", user: "a_operator")
            try stage.reports(cause)
            #expect(stage.log.contains("level=error msg=\"sweep failed\""))
        }
        try stage.database.psql("SELECT tokenkeeper.request_sweep()", user: "a_operator")
        try stage.isOver("rejected_result is locked")
        stage.stop()
    }
}
