import Testing

@testable import tokenkeeperd

@Suite struct `Import of other formats` {
    @Test func `JSON Lines: keys, escapes, lists and null`() throws {
        let read = try ImportedText(
            #"""
            {"token":"aa","tags":["a\"b","ü\u00fc\ud83d\ude00"],"device_id":12,"unregistered":true,"more":{"x":[1,"]"]}}

            {"to\u006ben":"bb","topic":"a\\b","user_id":null,"tags":[]}
            {"token":"cc","tags":"x, y"}
            """#, ["--format", "jsonl", "--topic", "t"])
        #expect(
            read.rows == [
                "production\tt\t2026-01-01 00:00:00+00\t12\t\\N\t{\"a\\\\\"b\",\"üü😀\"}\tt\t7\taa",
                "production\ta\\\\b\t2026-01-01 00:00:00+00\t\\N\t\\N\t{}\tf\t7\tbb",
                "production\tt\t2026-01-01 00:00:00+00\t\\N\t\\N\t{\"x\",\"y\"}\tf\t7\tcc",
            ])
        #expect(read.refused == [])
    }

    @Test(arguments: [
        "{", "[]", "{\"token\":\"aa\"} x", "{\"token\":\"a\\ud800a\"}", "{\"token\" \"aa\"}", "{\"token\":[\"aa\"]}",
        "{\"token\":\"aa\",\"x\":[}", "{\"token\":\"aa\",\"tags\":[1]}", "{\"token\":\"aa\",}", "{\"a\":}",
    ])
    func `JSON Lines: a malformed line is refused, and can be read again with its cause`(line: String) throws {
        let read = try ImportedText(
            "{\"token\":\"bb\"}\n\(line)\n{\"token\":\"cc\"}", ["--format", "jsonl", "--topic", "t"])
        #expect(read.rows.map { $0.suffix(2) } == ["bb", "cc"])
        #expect(read.refused.count == 1 && read.refused[0].hasPrefix("2 "), "\(read.refused)")
        let again = try ImportedText(read.rejects, ["--format", "jsonl", "--topic", "t"])
        #expect(again.rows == [] && again.refused.count == 1)
    }

    private static func tuple(_ time: UInt32, _ token: [UInt8]) -> [UInt8] {
        (0..<4).map { UInt8(truncatingIfNeeded: time >> (24 - 8 * $0)) } + [0, UInt8(token.count)] + token
    }

    @Test func `Apple's feedback: a tuple becomes a 410 with its time`() throws {
        let bytes =
            Self.tuple(1_500_000_000, [0xAB, 0xCD]) + Self.tuple(0, [1]) + Self.tuple(1_600_000_000, [0xEF]) + [
                1, 2, 3,
            ]
        let read = try ImportedText(bytes, ["--format", "apple-feedback", "--topic", "t", "--environment", "sandbox"])
        #expect(
            read.rows == [
                "sandbox\tt\t410\t{\"reason\":\"Unregistered\",\"timestamp\":1500000000000}\t2017-07-14 02:40:00+00\tabcd",
                "sandbox\tt\t410\t{\"reason\":\"Unregistered\",\"timestamp\":1600000000000}\t2020-09-13 12:26:40+00\tef",
            ])
        #expect(
            read.refused == [
                "2 the time is before 2008, when APNs did not exist: \"0\"", "4 the last tuple is cut off",
            ])
        #expect(Array(read.rejects.utf8) == Self.tuple(0, [1]) + [1, 2, 3])
        #expect(read.causes.split(separator: "\n").count == 2 && read.causes.hasPrefix("tuple 2: "))
        #expect(throws: ImportProblem.self) {
            try ImportedText("GET / HTTP/1.1", ["--format", "apple-feedback", "--topic", "t"])
        }
    }

    @Test(arguments: [1, 7, 1000])
    func `Apple's feedback: what comes before a broken tuple is imported, and the place is named`(piece: Int) throws {
        let good = Self.tuple(1_500_000_000, [0xAB, 0xCD]) + Self.tuple(0, [1]) + Self.tuple(1_600_000_000, [0xEF])
        let bytes = good + [0, 0, 0, 1, 0xFF, 0xFF] + Self.tuple(1_600_000_000, [0x12])
        let read = try ImportedText(bytes, ["--format", "apple-feedback", "--topic", "t"], piece: piece)
        #expect(read.rows.map { $0.split(separator: "\t").last } == ["abcd", "ef"])
        #expect(read.refused.map { $0.prefix(2) } == ["2 "] && Array(read.rejects.utf8) == Self.tuple(0, [1]))
        #expect(read.position.offset == good.count && read.position.records == 3)
        let problem = read.problem?.description ?? ""
        #expect(problem.hasPrefix("after 3 tuples, at byte \(good.count), "), "\(problem)")
        #expect(problem.contains("65535 bytes"), "\(problem)")
    }

    @Test func `Azure: an element that is cut off or malformed costs only itself`() throws {
        func element(_ token: String) -> String {
            "<RegistrationDescription xmlns:i=\"x\" i:type=\"AppleRegistrationDescription\"><DeviceToken>\(token)</DeviceToken></RegistrationDescription>"
        }
        let text = element("aa") + "\n" + element("bb").dropLast(40) + "\n" + element("cc") + " oops " + element("&x;")
        let read = try ImportedText(String(text), ["--format", "azure", "--topic", "t"])
        #expect(read.rows.map { $0.suffix(2) } == ["aa", "cc"])
        #expect(read.refused.count == 3, "\(read.refused)")
        let again = try ImportedText(read.rejects, ["--format", "azure", "--topic", "t"])
        #expect(again.rows == [] && again.refused.count == 3, "\(read.rejects)")
    }

    @Test func `a format takes only the options that it has a use for`() {
        for arguments in [
            ["--format", "azure"], ["--format", "sygnal"], ["--format", "csv", "--app", "a=b"],
            ["--format", "jsonl", "--no-header"], ["--format", "csv", "--delimiter", "ab"],
            ["--format", "csv", "--environment-value", "dev=test"], ["--format", "csv", "--as-of", "soon"],
            ["--format", "csv", "--as-of", "2999-01-01"], ["--format", "csv", "--utc-offset", "9"],
            ["--format", "csv", "--time-format", "epoch"], ["--format", "csv", "--environment", "test"],
        ] {
            #expect(throws: (any Error).self, "\(arguments)") { try ImportOptions.parse(arguments) }
        }
    }
}
