import APNsFeedback
import Foundation
import Testing

@testable import tokenkeeperd

@Suite struct `The marks of what was sent` {
    private let directory: TemporaryDirectory
    private let files: SentMarkFiles

    init() throws {
        directory = try TemporaryDirectory()
        files = SentMarkFiles(directory: directory.path)
    }

    private func path(_ daemonID: String) -> String {
        directory.path + "/sent-" + daemonID.replacingOccurrences(of: "/", with: ":")
    }

    @Test func `a request is marked from the moment when it may be sent until its slot is cleared`() throws {
        let marks = try files.create(for: "host/1/1", slots: 3)
        #expect(files.sent(by: "host/1/1") == [])
        for slot in 0..<3 { marks.enter(Int64(slot + 100), in: slot) }
        #expect(files.sent(by: "host/1/1") == [])
        marks.maySend(0)
        marks.maySend(2)
        marks.maySend(2)
        #expect(files.sent(by: "host/1/1") == [100, 102], "a repetition changes nothing")
        marks.didNotSend(2)
        marks.didNotSend(1)
        #expect(files.sent(by: "host/1/1") == [100])
        marks.maySend(2)
        marks.clear(0)
        #expect(files.sent(by: "host/1/1") == [102])
        marks.maySend(0)
        #expect(files.sent(by: "host/1/1") == [102], "a late call for a free slot")
        marks.enter(200, in: 0)
        #expect(files.sent(by: "host/1/1") == [102])
        marks.maySend(0)
        #expect(files.sent(by: "host/1/1") == [102, 200])
    }

    @Test func `a campaign's request, which has a negative number, is marked like any other`() throws {
        let marks = try files.create(for: "host/1/1", slots: 3)
        let numbers = [-(1 << 32 | 513), 7, -(((1 << 30) - 1) << 32 | 0xffff_ffff)] as [Int64]
        for (slot, number) in numbers.enumerated() { marks.enter(number, in: slot) }
        #expect(files.sent(by: "host/1/1") == [])
        for slot in 0..<3 { marks.maySend(slot) }
        #expect(files.sent(by: "host/1/1") == Set(numbers))
        marks.didNotSend(0)
        marks.clear(1)
        #expect(files.sent(by: "host/1/1") == [numbers[2]])
    }

    @Test func `while a request has no slot, nothing is known`() throws {
        var slots = Slots(capacity: 2)
        let marks = try files.create(for: "host/1/1", slots: 2)
        #expect([1, 2, 2].map { slots.take($0) } == [0, 1, 1] && slots.beyond == 0)
        let third = slots.take(3)
        #expect(third > 1 && slots.take(4) != third && slots.beyond == 2 && slots[3] == third)
        marks.enter(3, in: third)
        marks.maySend(third)
        marks.note(beyond: slots.beyond)
        #expect(files.sent(by: "host/1/1") == nil)
        #expect(slots.release(3) == third && slots.release(4) != nil && slots.release(4) == nil && slots.beyond == 0)
        marks.clear(third)
        marks.note(beyond: slots.beyond)
        #expect(files.sent(by: "host/1/1") == [])
        #expect(slots.release(1) == 0 && slots.take(5) == 0 && slots[1] == nil, "the first free slot of the file")
    }

    @Test func `a file is for this user only, has its size from the start, and never replaces another one`() throws {
        _ = try files.create(for: "a.host/17/1700000000", slots: 1000)
        let about = try FileManager.default.attributesOfItem(atPath: path("a.host/17/1700000000"))
        #expect(about[.posixPermissions] as? Int == 0o600 && about[.size] as? Int == 8024)
        var used = stat()
        #expect(stat(path("a.host/17/1700000000"), &used) == 0 && used.st_blocks * 512 >= 8024)
        #expect(throws: MappedWords.Failure.self) { try files.create(for: "a.host/17/1700000000", slots: 1000) }
        let elsewhere = directory.path + "/elsewhere"
        try FileManager.default.createSymbolicLink(atPath: path("b/1/1"), withDestinationPath: elsewhere)
        #expect(throws: MappedWords.Failure.self) { try files.create(for: "b/1/1", slots: 1) }
        #expect(!FileManager.default.fileExists(atPath: elsewhere))
        #expect(Set(files.daemons) == ["a.host/17/1700000000", "b/1/1"])
        files.remove("b/1/1")
        files.remove("none/1/1")
        #expect(files.daemons == ["a.host/17/1700000000"])
    }

    @Test func `a file that is missing, damaged or of the wrong size tells nothing`() throws {
        #expect(files.sent(by: "none/1/1") == nil)
        let marks = try files.create(for: "host/1/1", slots: 4)
        marks.enter(7, in: 0)
        marks.maySend(0)
        let good = try Data(contentsOf: URL(fileURLWithPath: path("host/1/1")))
        func sent(_ data: Data) throws -> Set<Int64>? {
            try data.write(to: URL(fileURLWithPath: path("other/1/1")))
            return files.sent(by: "other/1/1")
        }
        #expect(try sent(good) == [7])
        #expect(try sent(Data()) == nil && sent(good.prefix(16)) == nil && sent(good.dropLast(3)) == nil)
        #expect(try sent(good.dropLast(8)) == nil && sent(good + Data(count: 8)) == nil)
        #expect(try sent(Data(count: good.count)) == nil && sent(Data(repeating: 0xff, count: good.count)) == nil)
        for place in 0..<24 {
            var damaged = good
            damaged[place] ^= 1
            #expect(try sent(damaged) == nil, "byte \(place)")
        }
        try FileManager.default.createDirectory(atPath: path("folder/1/1"), withIntermediateDirectories: false)
        #expect(files.sent(by: "folder/1/1") == nil)
        try FileManager.default.createSymbolicLink(atPath: path("link/1/1"), withDestinationPath: path("host/1/1"))
        #expect(files.sent(by: "link/1/1") == nil)
        #expect(mkfifo(path("fifo/1/1"), 0o600) == 0 && files.sent(by: "fifo/1/1") == nil)
    }

    @Test func `without a directory that can be written to there is an error and no file`() throws {
        #expect(throws: MappedWords.Failure.self) {
            try SentMarkFiles(directory: directory.path + "/none").create(for: "host/1/1", slots: 1)
        }
        #expect(SentMarkFiles(directory: directory.path + "/none").daemons == [])
    }
}
