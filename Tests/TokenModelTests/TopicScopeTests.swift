import Testing
import TokenModel

@Suite struct `Topic scopes` {
    @Test func `a scope prints as people name it`() {
        #expect("\(TopicScope(.sandbox, Topic("com.example.app")!))" == "com.example.app (sandbox)")
    }

    @Test func `a token's address names its scope`() {
        let address = TokenAddress(environment: .production, topic: Topic("t")!, token: DeviceToken(hex: "ab")!)
        #expect(address.scope == TopicScope(environment: "production", topic: "t"))
    }

    @Test func `both names make the scope`() {
        let scopes: Set<TopicScope> = [
            .init(environment: "production", topic: "a"), .init(environment: "sandbox", topic: "a"),
            .init(environment: "production", topic: "b"), .init(environment: "production", topic: "a"),
        ]
        #expect(scopes.count == 3)
    }

    @Test func `names compare byte by byte, as in PostgreSQL`() {
        let (composed, decomposed) = ("caf\u{e9}", "cafe\u{301}")
        #expect(composed == decomposed, "to Swift they are one text")
        #expect(
            TopicScope(environment: "production", topic: composed)
                != TopicScope(environment: "production", topic: decomposed))
    }

    @Test func `the environment comes first in the order, then the topic by its bytes`() {
        let scopes = [("production", "B"), ("production", "a"), ("production", "é"), ("sandbox", "A")].map {
            TopicScope(environment: $0.0, topic: $0.1)
        }
        #expect(scopes.reversed().sorted() == scopes)
    }

    @Test(arguments: [
        ("production", "t", true), ("sandbox", "t", true), ("moon", "t", false), ("production", "", false),
        ("production", "a b", false),
    ])
    func `APNs knows two environments, and each topic can be a header`(
        environment: String, topic: String, isValid: Bool
    ) {
        #expect(TopicScope(environment: environment, topic: topic).isValid == isValid)
    }
}
