import Testing

@testable import TokenModel

@Test(arguments: [(1, "1 result is"), (0, "0 results are"), (2, "2 results are")])
func `one is singular, and any other number plural`(number: Int, words: String) {
    #expect(counted(number, "result is", "results are") == words)
}
