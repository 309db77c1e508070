/// The advisory locks of tokenkeeperd, all at transaction level: safe behind a pooler, and freed by whatever ends the
/// transaction. They share the database with the application's, hence the form of two integers with this class.
enum Advisory {
    /// The first integer of each: `tk` in ASCII.
    static let lockClass: Int32 = 0x746B

    static let migration: Int32 = 0
    static let sweepClaim: Int32 = 1
    static let tokenCount: Int32 = 2
    /// Held shared by each batch of the drain, and by `forget` alone: what is queued then stays where it can be found.
    static let forgetting: Int32 = 3

    /// A range of a queue leaf, so that daemons share the work instead of waiting for each other.
    static func range(leaf: Leaf, firstPage: Int) -> Int32 {
        Int32(truncatingIfNeeded: 1 << 28 | leaf.number << 24 | (firstPage / Leaf.pagesPerRange) & 0xFF_FFFF)
    }

    /// A leaf: held shared by whoever looks at it or works on some of its rows, and alone by whoever reads it whole. Asked
    /// before the leaf itself, whose own lock others would have to wait for.
    static func leaf(_ leaf: Leaf) -> Int32 {
        Int32(1 << 27 | leaf.number)
    }
}
