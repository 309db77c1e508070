internal import TokenLedger
internal import TokenModel

/// What `--complete` adds to an import: who is back, and who is gone.
struct CompleteImport {
    let list: CompleteList
    private(set) var returned: Int64 = 0
    private(set) var loggedOut: Int64 = 0
    /// Whether the list was known before, so that somebody may be missing now.
    private var wasKnown = true

    /// How many tokens leave the list in one transaction.
    private static let step: Int32 = 5000

    init(_ list: CompleteList) { self.list = list }

    mutating func note(returned tokens: Int64) { returned += tokens }

    /// Logs out whom the file does not have.
    ///
    /// - Parameter pause: Waits for the queue after so many rows, and says whether to go on.
    /// - Returns: False if it was stopped.
    mutating func logOut(
        by source: ImportSource, on connection: inout Connection,
        pause: (Int64, inout Connection) throws(DatabaseError) -> Bool
    ) throws(DatabaseError) -> Bool {
        wasKnown = try list.state(on: &connection)?.isKnown ?? false
        while true {
            let step = try CompleteList.logOut(by: source.id, most: Self.step, on: &connection)
            loggedOut += step.queued
            if step.gone == 0 { return true }
            if try !pause(step.queued, &connection) { return false }
        }
    }

    /// - Parameter undo: The command that undoes logouts, but for their time.
    func lines(refused: Int64, undo: String) -> [String] {
        if refused > 0 { return ["list \(list.name): \(Self.refusal("nobody is logged out"))"] }
        if !wasKnown { return ["list \(list.name): known from now on; nobody is logged out by its first import"] }
        let logouts = counted(loggedOut, "logout", "logouts")
        return [
            "list \(list.name): queued \(logouts), and \(counted(returned, "token that is back", "tokens that are back"))"
        ]
            + (loggedOut > 0 ? ["to undo the logouts: \(undo) --since TIME"] : [])
    }

    private static func refusal(_ words: String) -> String {
        "\(words), because a refused row may have any token. Fix the refused rows in the file, or leave them out with --filter, and import the file again"
    }

    /// What a file would do to its list.
    struct Rehearsal {
        let list: CompleteList
        private var seen = Set<Int>()
        private var known: Int64 = 0

        init(_ list: CompleteList) { self.list = list }

        mutating func note(_ rows: [UInt8], on connection: inout Connection) throws(DatabaseError) {
            known += try list.count(CompleteList.Tokens(rows: rows).new(in: &seen), on: &connection)
        }

        func lines(refused: Int, on connection: inout Connection) throws -> [String] {
            guard let state = try list.state(on: &connection) else {
                return ["list \(list.name): new, so nobody would be logged out"]
            }
            if state.isLater {
                throw ImportProblem(
                    "the list \(list.name) was imported as of a later time: see --as-of, and the SQL function drop_list"
                )
            }
            if refused > 0 { return ["list \(list.name): \(CompleteImport.refusal("nobody would be logged out"))"] }
            if !state.isKnown { return ["list \(list.name): not known yet, so nobody would be logged out"] }
            return [
                "list \(list.name): would log out \(state.members - known) of \(state.members), back \(Int64(seen.count) - known)"
            ]
        }
    }
}
