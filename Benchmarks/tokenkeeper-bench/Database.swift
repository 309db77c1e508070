import LedgerTestSupport

/// One database of the cluster, a copy of a template.
struct Database {
    let cluster: PrivateCluster
    let name: String

    func session() throws -> Session { try cluster.session(name) }

    func url(user: String = "a_daemon", overTLS: Bool = false) -> String {
        cluster.cluster.url(database: name, user: user, overTCP: overTLS)
            + "&sslmode=\(overTLS ? "require" : "disable")"
    }

    func drop() throws { try cluster.drop(name) }
}
