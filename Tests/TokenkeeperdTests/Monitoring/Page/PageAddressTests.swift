import Testing

@testable import tokenkeeperd

@Suite struct `Addresses of the status page` {
    @Test(arguments: [
        "com.example.app", "..", ".", "a/b", "a?b#c", "50%", "100%25", "a:b", "", "Ünï 🙂", "a+b c", "<script>",
    ])
    func `a topic of any name has one`(topic: String) {
        let address = PageAddress.topic(topic, environment: "sandbox")
        #expect(PageAddress(path: address.path) == address, "\(address.path)")
        #expect(address.path.split(separator: "/").count == 2)
        #expect(address.path.utf8.allSatisfy { $0 > 32 && $0 < 127 && !"<>\"'&?#+".utf8.contains($0) })
    }

    @Test func `a proxy may have decoded a slash`() {
        #expect(PageAddress(path: "/topic/production:a/b") == .topic("a/b", environment: "production"))
    }

    @Test func `they refer to each other relatively`() {
        let topic = PageAddress.topic("t", environment: "production")
        #expect(topic.path(from: .overview) == "topic/production:t")
        #expect(topic.path(from: .campaign(7)) == "../topic/production:t")
        #expect(PageAddress.overview.path(from: topic) == "../" && PageAddress.overview.path(from: .find) == "./")
        #expect(PageAddress.find.path(from: .find) == "find")
    }

    @Test(arguments: [
        "", "/metrics", "/find/x", "/topic", "/topic/t", "/topic/production:%", "/topic/production:%zz",
        "/topic/production:%+1",
        "/topic/production:%ff", "/topic/production:%00", "/topic/production", "/campaign/", "/campaign/x",
        "/campaign/99999999999999999999",
    ])
    func `there is no other`(path: String) {
        #expect(PageAddress(path: path) == nil)
    }

    @Test func `a field of a form is decoded`() {
        #expect(PageAddress.field("q", of: "x=1&q=a+b%2Bc%26&y=") == "a b+c&")
        #expect(PageAddress.field("q", of: "qq=1") == nil && PageAddress.field("q", of: "q=%f") == nil)
    }
}
