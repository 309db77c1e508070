internal import TokenLedger
internal import TokenModel

extension ShardMap {
    /// Reads the file of a shard map: TOML with the one key `shards`, an array of connection strings in the order of the numbers.
    ///
    /// - Throws: All problems, with the file's name.
    init(file path: String) throws(ConfigurationError) {
        let bytes: SecretBytes
        do {
            bytes = try SecretBytes(contentsOf: path, limit: TOMLScanner.maximumSize)
        } catch {
            throw ConfigurationError(["\(path) cannot be read: \(error)"])
        }
        let file = try ConfigurationFile(bytes.unprotected, name: path)
        if let other = file.entries.first(where: { $0.key != "shards" }) {
            throw ConfigurationError(["\(path):\(other.line): found \(other.key), expected only shards"])
        }
        guard case .texts(let connections) = file.entries.first?.value else {
            throw ConfigurationError(["\(path): expected shards = [\"host=… dbname=…\", …]"])
        }
        do {
            try self.init(connections)
        } catch {
            throw ConfigurationError(["\(path): \(error)"])
        }
    }
}
