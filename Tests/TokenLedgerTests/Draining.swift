import APNsFeedback
import TokenLedger

/// Drains what there is, until a pass moves nothing.
@discardableResult
func drain(_ connection: inout Connection, intake: Intake? = nil) throws -> Intake.Pass {
    var intake =
        intake ?? Intake(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
    var sum = Intake.Pass()
    while true {
        let pass = try intake.onePass(on: &connection)
        sum.add(pass)
        if !pass.moved { return sum }
    }
}

/// Undoes what `reinstate` has left to do, as the daemons do.
func undo(_ connection: inout Connection) throws {
    while try Reinstatement.undo(within: .seconds(5), on: &connection, while: { true }) {}
}

extension Intake {
    /// One pass that nothing interrupts.
    mutating func onePass(on connection: inout Connection) throws -> Pass {
        try pass(on: &connection, tell: { _ in }, betweenBatches: { _, _, _ in true })
    }
}

extension GuardLimits {
    /// Nothing is held.
    static let off = GuardLimits(minTokens: 0, maxShare: .percent(100))
}
