extension Connection {
    /// Does one thing that fails alone: what comes after it is done all the same.
    ///
    /// - Parameter trouble: Gets what a person must fix, if the work is refused and nothing was refused before.
    /// - Returns: Nil if the work takes too long, another session holds a lock, or it is refused.
    /// - Throws: Only if the connection is lost.
    @discardableResult
    package mutating func attempt<Value>(
        noting trouble: inout DatabaseError?, _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value? {
        do {
            return try work(&self)
        } catch {
            switch error.remedy {
            case .reconnect: throw error
            case .retry: break
            case .fixData, .fixSetup: trouble = trouble ?? error
            }
            return nil
        }
    }
}
