/// How many results of one kind were counted in `tokenkeeper.result_count`.
public struct ResultCount: Sendable, Equatable {
    public var kind: ResultKind
    public var results: Int
}

/// What results have in common that are counted together.
public struct ResultKind: Hashable, Sendable {
    /// As the sender wrote it, and so possibly none that exists; nil if the result was rejected, or for the rest of the 200s.
    public var environment: String?
    /// As the sender wrote it; nil as above.
    public var topic: String?
    /// Nil if HTTP has no such status.
    public var status: Int32?
    /// Nil if APNs gave none.
    public var reason: String?
}
