import APNsFeedback
import TokenLedger

/// Drains the queue until a pass moves nothing.
@discardableResult
func drainAll(_ connection: inout Connection, drain: Drain? = nil) throws -> Drain.Pass {
    var drain =
        drain ?? Drain(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
    var sum = Drain.Pass()
    while true {
        let pass = try drain.onePass(on: &connection)
        sum.add(pass)
        if !pass.moved { return sum }
    }
}

/// Performs the undo that `reinstate` has requested, as the daemons do.
func undo(_ connection: inout Connection) throws {
    while try Reinstatement.undo(within: .seconds(5), on: &connection, while: { true }) {}
}

extension Drain {
    /// Runs one pass without interruption.
    mutating func onePass(on connection: inout Connection) throws -> Pass {
        try pass(on: &connection, report: { _ in }, betweenBatches: { _, _, _ in true })
    }
}

extension GuardLimits {
    /// Limits that hold nothing.
    static let off = GuardLimits(allowance: 0, maxShare: .percent(100))
}
