import Testing

@testable import APNsFeedback

@Suite struct OutputBufferTests {
    @Test func `a request is sent when TLS has taken the last byte of its last frame`() {
        for step in 1...10 {
            var buffer = OutputBuffer()
            var left: [Int32] = []
            var taken: [UInt8] = []
            for stream in 1...5 as ClosedRange<Int32> {
                for part in 0..<2 as Range<UInt8> {
                    [UInt8](repeating: UInt8(stream) * 2 + part, count: 3).withUnsafeBufferPointer { buffer.append($0) }
                }
                buffer.markEnd(of: stream)
                let count = min(step, buffer.count)
                taken += buffer.withBytes { Array($0[..<count]) }
                left += buffer.remove(count)
                #expect(left.count == taken.count / 6)
            }
            while !buffer.isEmpty {
                taken += buffer.withBytes { Array($0[..<1]) }
                left += buffer.remove(1)
                #expect(left.count == taken.count / 6)
            }
            #expect(left == [1, 2, 3, 4, 5] && taken == (2...11).flatMap { [UInt8](repeating: $0, count: 3) })
        }
    }
}
