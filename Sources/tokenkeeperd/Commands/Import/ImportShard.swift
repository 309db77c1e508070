internal import TokenModel

/// Which rows of a file a shard takes. Pure.
struct ImportShard: Equatable {
    let number: Int
    let count: ShardCount
    /// Whether the same file is read for each shard in turn: then the rows that are refused are those of shard 0 alone, as in the queues.
    let isRouted: Bool

    /// Why rows are skipped.
    static let other = "of another shard"

    var takesRefused: Bool { !isRouted || number == 0 }

    /// - Parameter digits: A token in hex.
    func has(_ digits: ArraySlice<UInt8>) -> Bool {
        let token = DeviceToken(hex: String(decoding: digits, as: UTF8.self))
        return (token?.shard(of: count) ?? 0) == number
    }
}
