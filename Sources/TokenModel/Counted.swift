/// A number and what is counted, with the verb if there is one: `1 result is`, `7 results are`.
package func counted(_ number: some BinaryInteger, _ one: String, _ many: String) -> String {
    "\(number) \(number == 1 ? one : many)"
}
