internal import CLibPQ
internal import Dispatch
internal import Glibc
public import TokenModel

/// One connection to the database, owned by one thread. It keeps no session state, so it works behind a transaction pooler.
///
/// Start here: this file is the driver of libpq. `DatabaseAddress` says where to connect, `Parameter` and `Row` convert values,
/// `BatchTransaction` opens transactions, `OwnNames` says which names resolve in them, and `DatabaseError` says what to do about a
/// failure.
@safe public struct Connection: ~Copyable {
    /// Used in this file, CopyIn.swift and ConnectionName.swift only.
    let handle: OpaquePointer

    /// The oldest server that has TID range scans.
    static let oldestServer = 140_000

    /// How long the server may be silent during a statement before the connection counts as lost.
    /// Longer than any `statement_timeout` set here. A statement that can be cancelled has the longer limit.
    struct Patience: Sendable {
        var usual: Duration = .seconds(120)
        var stoppable: Duration = .seconds(900)
    }

    /// How often a thread that waits for the server reports that it is alive.
    static let tick: Duration = .seconds(1)

    /// How long a thread may be silent between two statements or ticks: the machine may be busy.
    static let grace: Duration = .seconds(30)

    /// Lets the watchdog tell a thread that waits for the server from one that hangs. Called before and during everything that
    /// may take long.
    ///
    /// - Parameters:
    ///   - heardOfWithin: Within this time, the wait is over or this is called again.
    ///   - silentFor: How long the server has been silent.
    public typealias Waiting = @Sendable (_ heardOfWithin: Duration, _ silentFor: Duration) -> Void

    let patience: Patience
    /// When the connection counts as lost, whatever it does; nil for never.
    let deadline: ContinuousClock.Instant?
    let waiting: Waiting
    /// Whether every transaction begins with `OwnNames.setting`, also one that a single statement is.
    let ownNamesOnly: Bool
    private let statements: DurationHistogram?
    private let cancelling = Cancelling()

    /// Connects. Blocks for at most the connection timeout of each host.
    ///
    /// - Parameters:
    ///   - writes: Whether the primary is needed: a standby is refused, and of several hosts the primary is chosen.
    ///   - silence: How long the server may be silent during a statement before the connection counts as lost.
    ///   - deadline: When the connection counts as lost in any case.
    ///   - statements: Takes how long each round trip lasts, from sending the statement to its last result.
    ///   - waiting: Called from the thread that uses the connection.
    public init(
        to address: DatabaseAddress, writes: Bool = true, silence: Duration = .seconds(120),
        until deadline: ContinuousClock.Instant? = nil, statements: DurationHistogram? = nil,
        waiting: @escaping Waiting = { _, _ in }
    ) throws(DatabaseError) {
        try self.init(
            to: address, writes: writes, patience: Patience(usual: silence), until: deadline, statements: statements,
            waiting: waiting)
    }

    /// A connection of a test, which also plays the provider: what it sends outside a transaction resolves names as in psql.
    package init(asInPsql address: DatabaseAddress, writes: Bool = true) throws(DatabaseError) {
        try self.init(to: address, writes: writes, patience: Patience(), ownNamesOnly: false) { _, _ in }
    }

    init(
        to address: DatabaseAddress, writes: Bool, patience: Patience, until deadline: ContinuousClock.Instant? = nil,
        statements: DurationHistogram? = nil, ownNamesOnly: Bool = true, waiting: @escaping Waiting
    ) throws(DatabaseError) {
        let attempt = try address.attempt(writes: writes, isUrgent: deadline != nil)
        waiting(attempt.patience, .zero)
        unsafe handle = try Self.open(attempt.parameters, password: attempt.password)
        self.patience = patience
        self.deadline = deadline
        self.ownNamesOnly = ownNamesOnly
        self.waiting = waiting
        self.statements = statements
        waiting(Self.grace, .zero)
    }

    private static func open(
        _ parameters: [(keyword: String, value: String)], password: SecretBytes?
    ) throws(DatabaseError) -> OpaquePointer {
        let handle = unsafe DatabaseAddress.withCStrings(parameters, password: password) { keywords, values in
            unsafe PQconnectdbParams(keywords, values, 1)
        }
        guard let handle = unsafe handle else { throw DatabaseError(.connection, "out of memory") }
        // libpq would print notices on standard error; they are meant for people who use psql.
        unsafe PQsetNoticeProcessor(handle, { _, _ in }, nil)
        guard unsafe PQstatus(handle) == CONNECTION_OK, unsafe PQsetnonblocking(handle, 1) == 0 else {
            defer { unsafe PQfinish(handle) }
            throw unsafe DatabaseError(connecting: lost(handle).message)
        }
        // Such a database has any bytes. The server would refuse to send those that are not UTF-8, and their rows would never end.
        if let encoding = unsafe PQparameterStatus(handle, "server_encoding"),
            unsafe String(cString: encoding) == "SQL_ASCII"
        {
            unsafe PQsetClientEncoding(handle, "SQL_ASCII")
        }
        let version = unsafe PQserverVersion(handle)
        guard version >= oldestServer else {
            unsafe PQfinish(handle)
            throw DatabaseError(
                sqlState: "0A000", message: "the server is PostgreSQL \(version / 10000), expected 14 or newer")
        }
        return unsafe handle
    }

    deinit { unsafe PQfinish(handle) }

    /// Runs one or several statements without parameters. Outside a transaction they form one, unless they open their own, and the
    /// first statement is `OwnNames.setting`.
    ///
    /// - Parameter patience: How long the server may be silent; nil for the usual time.
    /// - Returns: The result of the last statement that returned rows, as text; of the last statement, if none did.
    @discardableResult
    package mutating func run(
        _ script: String, patience: Duration? = nil
    ) throws(DatabaseError) -> Rows {
        let script = mustSetPath ? OwnNames.first(in: script) : script
        guard unsafe PQsendQuery(handle, script) == 1 else { throw lost() }
        return try collect(script, cancelWhen: nil, patience: patience ?? self.patience.usual)
    }

    /// Runs one statement. Values are passed as parameters only, and rows are returned in binary. Outside a transaction it gets one of its
    /// own, which costs two more round trips.
    ///
    /// - Parameter stop: When this is rung during the statement, the statement is cancelled (SQLSTATE 57014). It stays rung.
    package mutating func query(
        _ statement: String, _ parameters: [Parameter] = [], cancelWhen stop: Wakeup? = nil
    ) throws(DatabaseError) -> Rows {
        if mustSetPath {
            return try inOwnTransaction { connection throws(DatabaseError) in
                try connection.query(statement, parameters, cancelWhen: stop)
            }
        }
        // One block for all values: each pointer into it is valid until the statement is sent.
        var block: [UInt8] = []
        let counts = parameters.map { $0.encode(into: &block) }
        block.append(0)
        let types = parameters.map(\.type)
        let lengths = counts.map { Int32($0 ?? 0) }
        let formats = [Int32](repeating: 1, count: parameters.count)
        let sent = unsafe block.withUnsafeBytes { (start: UnsafeRawBufferPointer) -> Int32 in
            var offset = 0
            let values = unsafe counts.map { count -> UnsafePointer<CChar>? in
                guard let count else { return nil }
                defer { offset += count }
                return unsafe start.baseAddress.map { unsafe ($0 + offset).assumingMemoryBound(to: CChar.self) }
            }
            return unsafe PQsendQueryParams(
                handle, statement, Int32(parameters.count), types, values, lengths, formats, 1)
        }
        guard sent == 1 else { throw lost() }
        return try collect(
            statement, cancelWhen: stop, patience: stop == nil ? patience.usual : patience.stoppable)
    }

    /// Commits. The server responds to the COMMIT of an aborted transaction with ROLLBACK and no error, which is an error here.
    package mutating func commit() throws(DatabaseError) {
        let tag = try run("COMMIT").commandTag
        guard tag == "COMMIT" else {
            throw DatabaseError(sqlState: "25P02", message: "the transaction was rolled back instead of committed")
        }
    }

    /// Rolls back if a transaction is open and the connection still works. Otherwise the server rolls back.
    package mutating func rollback() {
        guard unsafe PQtransactionStatus(handle) != PQTRANS_IDLE else { return }
        _ = try? run("ROLLBACK").count
    }

    /// Reads all results before it throws anything: otherwise the next statement would receive them.
    mutating func collect(
        _ statement: String, cancelWhen stop: Wakeup?, patience: Duration
    ) throws(DatabaseError) -> Rows {
        var rows: OpaquePointer?
        var failure: DatabaseError?
        let began = ContinuousClock.now
        // A statement that failed or was cancelled has also taken its time.
        defer { statements?.record(began.duration(to: .now)) }
        while true {
            do {
                try waitForResult(cancelWhen: stop, patience: patience)
            } catch {
                unsafe PQclear(rows)
                throw error
            }
            guard let result = unsafe PQgetResult(handle) else { break }
            switch unsafe PQresultStatus(result) {
            case PGRES_TUPLES_OK:
                unsafe PQclear(rows)
                unsafe rows = result
            case PGRES_COMMAND_OK:
                let keep = unsafe rows.map { unsafe PQresultStatus($0) == PGRES_TUPLES_OK } ?? false
                unsafe PQclear(keep ? result : rows)
                if !keep { unsafe rows = result }
            default:
                failure = unsafe failure ?? error(in: result)
                unsafe PQclear(result)
            }
        }
        // A cancel request that is still on its way would hit the next statement.
        if stop != nil { cancelling.wait() }
        if let failure {
            unsafe PQclear(rows)
            throw failure
        }
        guard let rows = unsafe rows else { throw lost() }
        return unsafe Rows(owning: rows, of: statement)
    }

    /// Sends the rest of the statement and waits for the next result, in one `poll(2)`.
    func waitForResult(cancelWhen stop: Wakeup?, patience: Duration) throws(DatabaseError) {
        let clock = ContinuousClock()
        var heard = clock.now
        var asksToCancel = false
        while true {
            let unsent = unsafe PQflush(handle)
            guard unsent >= 0 else { throw lost() }
            if unsent == 0, unsafe PQisBusy(handle) == 0 { return }
            let socket = unsafe PQsocket(handle)
            guard socket >= 0 else { throw lost() }
            var watched = [
                pollfd(fd: socket, events: Int16(unsent == 1 ? POLLIN | POLLOUT : POLLIN), revents: 0),
                pollfd(fd: asksToCancel ? -1 : stop?.descriptor ?? -1, events: Int16(POLLIN), revents: 0),
            ]
            let ready = unsafe poll(&watched, 2, asksToCancel ? 100 : Int32(Self.tick.milliseconds))
            waiting(Self.grace, ready == 0 ? heard.duration(to: clock.now) : .zero)
            if ready < 0 && errno != EINTR { throw lost() }
            if watched[0].revents != 0 {
                guard unsafe PQconsumeInput(handle) == 1 else { throw lost() }
                heard = clock.now
            } else if watched[1].revents != 0 || asksToCancel {
                // Repeated: a request that reaches the server before its statement has no effect.
                asksToCancel = true
                cancel()
            }
            if clock.now > min(heard + patience, deadline ?? heard + patience) {
                // A statement that still runs is ended by its transaction's timeouts.
                throw DatabaseError(.connection, "the server has not answered for \(heard.duration(to: clock.now))")
            }
        }
    }

    /// Asks the server to cancel the statement. libpq's function blocks, without limit if the server does not respond. So it runs
    /// on a thread of its own, one at a time.
    private func cancel() {
        guard cancelling.begin() else { return }
        guard let request = unsafe PQgetCancel(handle) else { return cancelling.end() }
        DispatchQueue.global().async { [cancelling, request = UInt(bitPattern: request)] in
            let request = unsafe OpaquePointer(bitPattern: request)
            var complaint = [CChar](repeating: 0, count: 256)
            _ = unsafe PQcancel(request, &complaint, Int32(complaint.count))
            unsafe PQfreeCancel(request)
            cancelling.end()
        }
    }

    func error(in result: OpaquePointer) -> DatabaseError {
        let state = unsafe PQresultErrorField(result, Int32(UInt8(ascii: "C")))
        let primary = unsafe PQresultErrorField(result, Int32(UInt8(ascii: "M")))
        guard let primary = unsafe primary else { return lost() }
        let sqlState = unsafe state.map { unsafe String(cString: $0) }
        let message = unsafe Self.oneLine(String(cString: primary))
        guard let sqlState else { return DatabaseError(.connection, message) }
        let detail = unsafe PQresultErrorField(result, Int32(UInt8(ascii: "D")))
        let hint = unsafe PQresultErrorField(result, Int32(UInt8(ascii: "H")))
        return DatabaseError(
            reported: sqlState, message, detail: unsafe detail.map { unsafe Self.oneLine(String(cString: $0)) },
            hint: unsafe hint.map { unsafe Self.oneLine(String(cString: $0)) })
    }

    func lost() -> DatabaseError {
        unsafe Self.lost(handle)
    }

    private static func lost(_ handle: OpaquePointer) -> DatabaseError {
        unsafe DatabaseError(.connection, oneLine(String(cString: PQerrorMessage(handle))))
    }

    private static func oneLine(_ message: String) -> String {
        // Lines that begin with a tab are libpq's advice. In a message, what stands in backticks is a command of ours, and PostgreSQL quotes what
        // others have written.
        String(
            message.split(whereSeparator: \.isNewline).filter { !$0.hasPrefix("\t") }.joined(separator: "; ")
                .map { $0 == "`" ? "'" : $0 })
    }
}
