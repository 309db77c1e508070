import Testing
import TokenModel

@Suite struct `Shares` {
    @Test(arguments: [
        ("0%", 0), ("0.5%", 5_000), ("0.0001%", 1), ("7%", 70_000), ("12.34%", 123_400), ("100%", 1_000_000),
    ])
    func `a share reads as it is written, and is written as it reads`(text: String, millionths: Int64) throws {
        let share = try #require(Share(text))
        #expect(share.millionths == millionths)
        #expect(share.description == text)
    }

    @Test func `zeros at the end change nothing`() {
        #expect(Share("0.5000%") == Share("0.5%"))
        #expect(Share("010%") == Share("10%"))
        #expect(Share("100.0000%") == .percent(100))
    }

    @Test(arguments: [
        "", "%", "0.5", "50", "-1%", "+1%", "100.0001%", "101%", "0.00001%", ".5%", "5.%", "1.2.3%", "1e1%", "5 %",
        "%5",
        "5%%", "٥%", "99999999999999999999%",
    ])
    func `anything else is not a share`(text: String) {
        #expect(Share(text) == nil)
    }

    @Test func `shares compare by size`() {
        #expect(Share.percent(1) < Share(millionths: 10_001))
        #expect(!(Share.percent(1) < .percent(1)))
    }
}
