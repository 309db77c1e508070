extension [String] {
    /// The first ones, and a sentence that says how many more there are.
    ///
    /// - Parameter things: What the sentences are about, in the plural.
    func first(_ most: Int, of things: String) -> [String] {
        count > most ? prefix(most) + ["\(count - most) more \(things) have such a problem"] : self
    }
}
