internal import CLibPQ
internal import Glibc

extension Connection {
    /// How much is handed to libpq at once, in bytes.
    private static let copyPiece = 65_536

    /// Runs a `COPY … FROM STDIN` with these rows, in a transaction that is open. Either all of them are inserted, or it throws.
    ///
    /// - Parameters:
    ///   - statement: The COPY, in text format.
    ///   - rows: The rows as `CopyText` writes them. They are sent in pieces, so libpq holds no second copy of them.
    /// - Returns: How many rows were inserted.
    package mutating func copy(_ statement: String, rows: [UInt8]) throws(DatabaseError) -> Int {
        unsafe precondition(PQtransactionStatus(handle) != PQTRANS_IDLE, "a COPY outside a transaction: see OwnNames")
        guard unsafe PQsendQuery(handle, statement) == 1 else { throw lost() }
        try beginCopy(statement)
        var sent = 0
        while sent < rows.count {
            let length = min(Self.copyPiece, rows.count - sent)
            let queued = unsafe rows.withUnsafeBytes { bytes in
                unsafe PQputCopyData(
                    handle, (bytes.baseAddress! + sent).assumingMemoryBound(to: CChar.self), Int32(length))
            }
            guard queued >= 0 else { throw lost() }
            // Zero: the server is slower than this process, and nothing was queued.
            if queued == 1 { sent += length } else { try waitUntilWritable() }
        }
        while true {
            let ended = unsafe PQputCopyEnd(handle, nil)
            guard ended >= 0 else { throw lost() }
            if ended == 1 { break }
            try waitUntilWritable()
        }
        return try collect(statement, cancelWhen: nil, patience: patience.stoppable).affected
    }

    /// Waits until the server expects the rows. If it refuses the statement, reads everything and throws the error.
    private mutating func beginCopy(_ statement: String) throws(DatabaseError) {
        try waitForResult(cancelWhen: nil, patience: patience.usual)
        guard let first = unsafe PQgetResult(handle) else { throw lost() }
        let status = unsafe PQresultStatus(first)
        let failure = unsafe error(in: first)
        unsafe PQclear(first)
        if status == PGRES_COPY_IN { return }
        // The next statement would receive the rest.
        _ = try? collect(statement, cancelWhen: nil, patience: patience.usual).count
        throw failure
    }

    /// Waits until libpq could send something, and takes in what the server says meanwhile.
    private func waitUntilWritable() throws(DatabaseError) {
        let clock = ContinuousClock()
        let end = clock.now + patience.stoppable
        while true {
            let unsent = unsafe PQflush(handle)
            guard unsent >= 0 else { throw lost() }
            if unsent == 0 { return }
            guard clock.now < end else {
                throw DatabaseError(.connection, "the server has not taken any rows for \(patience.stoppable)")
            }
            var watched = pollfd(fd: unsafe PQsocket(handle), events: Int16(POLLIN | POLLOUT), revents: 0)
            let ready = unsafe poll(&watched, 1, Int32(Self.tick.milliseconds))
            waiting(Self.grace, .zero)
            if ready < 0 && errno != EINTR { throw lost() }
            if watched.revents & Int16(POLLIN) != 0 {
                guard unsafe PQconsumeInput(handle) == 1 else { throw lost() }
            }
        }
    }
}
