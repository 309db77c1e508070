/// Why a router cannot be made from a shard map.
public enum ShardError: Error, Equatable, CustomStringConvertible {
    /// What is wrong with the map, in words.
    case map(String)
    /// A shard does not answer, or its schema does not fit.
    case shard(Int, String)
    /// The shard is another one than the map says.
    case otherNumber(shard: Int, of: Int, isShard: Int, ofShards: Int)
    /// The database is to become a shard, and has tokens of other shards.
    case hasOtherTokens(shard: Int, of: Int)
    /// Another release has made the router.
    case otherRelease(router: String, this: String)
    /// PL/Proxy and postgres_fdw need a superuser.
    case notSuperuser(role: String)

    /// Whether a shard or its schema is at fault, and not the map.
    public var isOfService: Bool {
        if case .shard = self { true } else { false }
    }

    public var description: String {
        switch self {
        case .map(let problem): "the shard map: \(problem)"
        case .shard(let number, let problem): "shard \(number): \(problem)"
        case .otherNumber(let shard, let shards, let number, let count):
            "shard \(shard) of \(shards) in the map is shard \(number) of \(count), which is fixed forever: correct the order or the number of the shards in the map"
        case .hasOtherTokens(let shard, let shards):
            "the database of shard \(shard) has tokens that belong to another of the \(shards) shards: use new databases, and import the tokens through the router"
        case .otherRelease(let router, let this):
            "tokenkeeperd \(router) has made this router, and this is \(this): run `tokenkeeperd router migrate` with the release of the shards, and use that release"
        case .notSuperuser(let role):
            "\(role) is not a superuser of the router, and PL/Proxy needs one: run `sudo -u postgres tokenkeeperd router migrate …` on the router's server, or have an administrator run what --print prints"
        }
    }
}
