import APNsFeedback
import TokenLedger

/// Drains what there is, until a pass moves nothing.
@discardableResult
func drain(_ connection: inout Connection, intake: Intake? = nil) throws -> Intake.Pass {
    var intake = intake ?? Intake(lockTimeout: .milliseconds(50), interpret: Interpretation.verdict(on:))
    var sum = Intake.Pass()
    while true {
        let pass = try intake.pass(on: &connection, tell: { _ in }) { _ in true }
        sum.add(pass)
        if !pass.moved { return sum }
    }
}
