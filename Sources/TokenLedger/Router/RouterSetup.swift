extension RouterScript {
    private static let transaction = BatchTransaction(lockTimeout: .seconds(5), statementTimeout: .seconds(60))

    /// Makes the database of the connection a router.
    ///
    /// - Throws: 42501 unless the login is a superuser, 55000 if the database has a ledger, 2BP01 if somebody has built on its functions.
    public func apply(on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(Self.transaction) { connection throws(DatabaseError) in
            try connection.run(text)
        }
    }
}
