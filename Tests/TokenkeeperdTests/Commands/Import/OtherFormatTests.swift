import Testing

@testable import tokenkeeperd

@Suite struct `Import of other formats` {
    @Test func `JSON Lines: keys, escapes, lists and null`() throws {
        let read = try ImportedText(
            #"""
            {"token":"aa","tags":["a\"b","ü\u00fc\ud83d\ude00"],"device_id":12,"unregistered":true,"more":{"x":[1,"]"]}}

            {"to\u006ben":"bb","topic":"a\\b","user_id":null,"tags":[]}
            {"token":"cc","tags":"x, y"}
            """#, ["--format", "json", "--topic", "t"])
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
            "{\"token\":\"bb\"}\n\(line)\n{\"token\":\"cc\"}", ["--format", "json", "--topic", "t"])
        #expect(read.rows.map { $0.suffix(2) } == ["bb", "cc"])
        #expect(read.refused.count == 1 && read.refused[0].hasPrefix("2 "), "\(read.refused)")
        let again = try ImportedText(read.rejects, ["--format", "json", "--topic", "t"])
        #expect(again.rows == [] && again.refused.count == 1)
    }

    @Test func `JSON: a path is a key of an object within, or a key with a dot`() throws {
        let read = try ImportedText(
            #"""
            {"token":{"apn":"aa"},"Item":{"seen":{"N":"1735786800"},"user":{"S":"u"},"tags":{"SS":["x","y"]}}}
            {"token.apn":"bb","Item":null}
            {"token":"cc"}
            {"token":{"gcm":"dd"},"Item":{"user":{"S":"u"}}}
            """#,
            [
                "--format", "json", "--topic", "t", "--column", "token=token.apn", "--column",
                "registered_at=Item.seen.N", "--column", "user_id=Item.user.S", "--column", "tags=Item.tags.SS",
            ])
        #expect(
            read.rows == [
                "production\tt\t2025-01-02 03:00:00+00\t\\N\tu\t{\"x\",\"y\"}\tf\t7\taa",
                "production\tt\t2026-01-01 00:00:00+00\t\\N\t\\N\t\\N\tf\t7\tbb",
            ])
        #expect(read.refused == ["3 the token is empty", "4 the token is empty"])
        let filtered = try ImportedText(
            #"[{"token":"aa","os":{"name":"iOS"}},{"token":"bb","os":{"name":"Android"}},{"token":"cc","os":[1]}]"#,
            ["--format", "json", "--topic", "t", "--filter", "os.name=iOS"])
        #expect(filtered.rows.map { $0.suffix(2) } == ["aa"])
        #expect(filtered.details == ["  skipped 1: os.name is \"Android\"", "  skipped 1: os.name is empty"])
    }

    @Test(arguments: [1, 7, 1000])
    func `JSON: an array reads as its elements, and a malformed one costs itself`(piece: Int) throws {
        let text = """
            \u{FEFF} [ {"token":"aa","x":"],}\\"{"},
              {"token": "bb",
               "device_id": 5, "x": [{}]} , 12, ["cc"], {"token":"dd"
               "x":1}, {"token":"ee"}
            ]

            """
        let read = try ImportedText(text, ["--format", "json", "--topic", "t"], piece: piece)
        #expect(read.rows.map { $0.suffix(2) } == ["aa", "bb", "ee"] && read.problem == nil)
        #expect(read.refused == ["3", "4", "5"].map { "\($0) this is not a JSON object" })
        #expect(read.position.records == 6)
        #expect(read.rejects.contains("{\"tokenkeeperd\":\"element 5: this is"), "\(read.rejects)")
        let fixed = read.rejects.replacing("\"dd\"", with: "\"dd\",")
        let again = try ImportedText(fixed, ["--format", "json", "--topic", "t"], piece: piece)
        #expect(again.rows.map { $0.suffix(2) } == ["dd"] && again.refused.count == 2)
        #expect(try ImportedText("[]", ["--format", "json"], piece: piece).position.records == 0)
    }

    @Test(arguments: [1, 1000])
    func `JSON: an array that is cut off has not ended, and what comes before is imported`(piece: Int) throws {
        let usual = ["--format", "json", "--topic", "t"]
        for (end, words) in [
            ("", "cut off"), (",", "cut off"), (",{\"token\":\"b", "cut off"), ("] x", "something follows"),
        ] {
            let read = try ImportedText("[{\"token\":\"aa\"}\(end)", usual, piece: piece)
            #expect(read.rows.map { $0.suffix(2) } == ["aa"])
            #expect(read.problem?.description.contains(words) == true, "\(end)")
        }
        #expect(throws: ImportProblem.self) { try ImportedText("[", usual, piece: piece) }
        let long = "[{\"token\":\"aa\"},{\"x\":\"" + String(repeating: "x", count: PartEnd.longestRecord)
        let problem = try ImportedText(long, usual, piece: 1 << 16).problem?.description ?? ""
        #expect(problem.hasPrefix("after 1 element") && problem.contains("longer than 1 MiB"), "\(problem)")
    }

    @Test func `feedback: a 410 with its timestamp, or a reason that says that the token is bad`() throws {
        let usual = ["--format", "csv", "--topic", "t", "--feedback"]
        let text = """
            token,timestamp,reason
            aa,1500000000,Unregistered
            bb,1600000000123,Unregistered
            cc,2025-01-01,BadDeviceToken
            dd,2025-01-01,TooManyRequests
            ee,,Unregistered
            ff,0,Unregistered
            ab,1600000000,

            """
        let read = try ImportedText(text, usual)
        #expect(
            read.rows == [
                "production\tt\t410\t{\"reason\":\"Unregistered\",\"timestamp\":1500000000000}\t2017-07-14 02:40:00+00\taa",
                "production\tt\t410\t{\"reason\":\"Unregistered\",\"timestamp\":1600000000123}\t2020-09-13 12:26:40.123000+00\tbb",
                "production\tt\t400\t{\"reason\":\"BadDeviceToken\"}\t2025-01-01 00:00:00+00\tcc",
            ])
        #expect(
            read.refused == [
                "6 the timestamp is missing; see --as-of",
                "7 the time is before 2008, when APNs did not exist: \"0\"",
                "8 the reason is empty: APNs may have accepted the push",
            ])
        let log = "token,timestamp,status\naa,1500000000,200\nbb,1500000000,410\n"
        #expect(throws: (any Error).self) { try ImportedText(log, usual) }
        #expect(try ImportedText(log, usual + ["--filter", "status=410"]).rows.count == 1)
        #expect(read.details.contains("  skipped 1: reason TooManyRequests: says nothing about the token"))
        let given = try ImportedText("token\naa\n", usual + ["--as-of", "2025-01-01"])
        #expect(given.rows.count == 1 && given.rows[0].contains("1735689600000"))
        #expect(throws: (any Error).self) { try ImportedText("", usual + ["--column", "registered_at=x"]) }
    }

    @Test func `a file's own names of topics become topics, and others are refused`() throws {
        let read = try ImportedText(
            "token,app,environment\naa,1,\nbb,2,\ncc,3,\ndd,1,sandbox\n",
            [
                "--format", "csv", "--column", "topic=app", "--topic-value", "1=com.example.bank", "--topic-value",
                "2=com.example.pay:sandbox",
            ])
        #expect(
            read.rows.map { $0.split(separator: "\t")[0..<2].joined(separator: " ") } == [
                "production com.example.bank", "sandbox com.example.pay", "sandbox com.example.bank",
            ])
        #expect(read.refused == ["4 the topic is not named with --topic-value: \"3\""])
    }

    @Test func `a format takes only the options that it has a use for`() {
        for arguments in [
            ["--format", "xml"], ["--format", "json", "--no-header"], ["--format", "csv", "--delimiter", "ab"],
            ["--format", "csv", "--environment-value", "dev=test"], ["--format", "csv", "--as-of", "soon"],
            ["--format", "csv", "--as-of", "2999-01-01"], ["--format", "csv", "--time-zone", "+9"],
            ["--format", "csv", "--time-format", "epoch"], ["--format", "csv", "--environment", "test"],
            ["--format", "csv", "--topic-value", "1"], ["--format", "csv", "--topic-value", "1=t:prod"],
            ["--format", "csv", "--topic-value", "1=a b"],
        ] {
            #expect(throws: (any Error).self, "\(arguments)") { try ImportOptions.parse(arguments) }
        }
    }
}
