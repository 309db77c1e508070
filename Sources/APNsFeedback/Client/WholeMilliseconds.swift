extension Duration {
    /// Rounded down; at least 1.
    var wholeMilliseconds: Int32 {
        let whole = components.seconds * 1000 + components.attoseconds / 1_000_000_000_000_000
        return Int32(clamping: max(1, whole))
    }
}
