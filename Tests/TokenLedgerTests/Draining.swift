import APNsFeedback
import TokenLedger

/// Drains what there is, until a pass moves nothing.
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

/// Undoes what `reinstate` has left to do, as the daemons do.
func undo(_ connection: inout Connection) throws {
    while try Reinstatement.undo(within: .seconds(5), on: &connection, while: { true }) {}
}

extension Drain {
    /// One pass that nothing interrupts.
    mutating func onePass(on connection: inout Connection) throws -> Pass {
        try pass(on: &connection, report: { _ in }, betweenBatches: { _, _, _ in true })
    }
}

extension GuardLimits {
    /// Nothing is held.
    static let off = GuardLimits(allowance: 0, maxShare: .percent(100))
}
