internal import COpenSSL

/// How many databases share the tokens of a provider: a power of two from 1 to 1024, fixed forever.
public struct ShardCount: Hashable, Sendable {
    public let number: Int

    /// - Returns: Nil unless the number is a power of two from 1 to 1024.
    public init?(_ number: Int) {
        guard 1...1024 ~= number, number & (number - 1) == 0 else { return nil }
        self.number = number
    }
}

extension DeviceToken {
    /// The number of the shard that has this token, from 0, as the SQL function `tokenkeeper.shard_of` says. `clients/shard-vectors.json`
    /// has examples, which also hold for the client in Python.
    ///
    /// What is no token at all is on shard 0.
    public func shard(of shards: ShardCount) -> Int {
        var digest = [UInt8](repeating: 0, count: Int(EVP_MAX_MD_SIZE))
        // Fails only without memory, or if no provider has SHA-256: then OpenSSL could not verify a certificate either.
        guard unsafe EVP_Digest(bytes, bytes.count, &digest, nil, EVP_sha256(), nil) == 1 else {
            fatalError("OpenSSL computes no SHA-256")
        }
        let first = digest.prefix(4).reduce(UInt32(0)) { $0 << 8 | UInt32($1) }
        return Int(first) & (shards.number - 1)
    }
}
