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
        "{\"token\":\"aa\",\"x\":[}", "{\"token\":\"aa\",\"tags\":[[1]]}", "{\"token\":\"aa\",}", "{\"a\":}",
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
        #expect(read.refused == ["3 no key token.apn", "4 no key token.apn"])
        let filtered = try ImportedText(
            #"[{"token":"aa","os":{"name":"iOS"}},{"token":"bb","os":{"name":"Android"}},{"token":"cc","os":[1]}]"#,
            ["--format", "json", "--topic", "t", "--filter", "os.name=iOS"])
        #expect(filtered.rows.map { $0.suffix(2) } == ["aa"])
        #expect(filtered.details == ["  skipped 1: os.name is \"Android\"", "  skipped 1: os.name is empty"])
    }

    @Test
    func
        `JSON: a key that nobody named may be in upper case, keys that nobody reads are told, and no field is there twice`()
        throws
    {
        let read = try ImportedText(
            #"""
            {"Token":"aa","Registered_At":"2025-01-02","deviceId":"d","item":{"user":"u","n\u0061me":1}}
            {"token":"bb","registered_at":"2025-01-02","Registered_At":"2025-01-03"}
            {"token":"cc","registered_at":"2025-01-02","Registered_At":null,"deviceId":"d"}
            {"token":"dd","tags":["a"],"Tags":"b"}
            {"token":"ee","tags":"b","Tags":["a"]}
            """#, ["--format", "json", "--topic", "t", "--column", "user_id=item.user"])
        #expect(
            read.rows == [
                "production\tt\t2025-01-02 00:00:00+00\t\\N\tu\t\\N\tf\t7\taa",
                "production\tt\t2025-01-02 00:00:00+00\t\\N\t\\N\t\\N\tf\t7\tcc",
            ])
        #expect(read.refused == ["2 registered_at is there twice", "4 tags is there twice", "5 tags is there twice"])
        #expect(read.coverage.first == "  not read: deviceId, item.name")
        let named = try ImportedText(
            #"{"token":"aa","Device_ID":"d"}"#, ["--format", "json", "--topic", "t", "--column", "user_id=Device_ID"])
        #expect(named.rows[0].contains("\t\\N\td\t\\N\tf"), "a named key is no other field's")
        let again = try ImportedText(#"{"tokenkeeperd":"line 2: x"}"#, ["--format", "json", "--topic", "t"])
        #expect(again.coverage == [])
    }

    @Test(arguments: [
        (
            #"{"Endpoints":[{"Attributes":{"Token":"aa"}}],"NextToken":"x"}"#, "Attributes.Token",
            "no key Attributes.Token (Endpoints is an array: make lines of it with jq -c '.Endpoints[]')"
        ),
        (
            #"{"id":"u","push_tokens":[{"token":"aa"}]}"#, "push_tokens.token",
            "no key push_tokens.token (push_tokens is an array: make lines of it with jq)"
        ),
        (
            #"{"push_tokens":[{"token":"aa"}]}"#, "push_tokens.0.token",
            "no key push_tokens.0.token (push_tokens is an array: make lines of it with jq)"
        ),
        (
            #"{"x":{"Item":[{"token":"aa"}]}}"#, "x.Item.token",
            "no key x.Item.token (x.Item is an array: make lines of it with jq)"
        ),
        (
            #"{"a-b":[{"x":[1,{}]}],"tags":["y"]}"#, "token",
            "no key token (a-b is an array: make lines of it with jq)"
        ),
        (#"{"t\u006fken":{"apn":null}}"#, "token.apn", "the token is empty"),
        (#"{"token.apn":""}"#, "token.apn", "the token is empty"), (#"{"Token":null}"#, "token", "the token is empty"),
        (#"{"token":"aa"}"#, "token.apn", "no key token.apn"), ("{}", "token", "no key token"),
    ]) func `JSON: a key that is not there is told from an empty value`(line: String, column: String, cause: String)
        throws
    {
        let named = column == "token" ? [] : ["--column", "token=\(column)"]
        let read = try ImportedText(line + "\n", ["--format", "json", "--topic", "t"] + named)
        #expect(read.refused == ["1 \(cause)"])
        // What a filter leaves out is not refused.
        let filtered = try ImportedText(line, ["--format", "json", "--topic", "t", "--filter", "os=ios"] + named)
        #expect(filtered.refused == [])
    }

    @Test func `JSON: a number or a flag among the tags is a tag, and null is none`() throws {
        for (tags, kept) in [("[5,true]", #"{"5","true"}"#), (#"["news",null]"#, #"{"news"}"#), ("[null]", "{}")] {
            let read = try ImportedText(
                #"{"token":"aa","tags":\#(tags)}"#, ["--format", "json", "--topic", "t"])
            #expect(read.rows.map { $0.split(separator: "\t")[5] } == [Substring(kept)], "\(read.refused)")
        }
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

    @Test func `the topics that rows name are told, and one without a dot is doubted`() throws {
        let usual = ["--format", "csv"]
        let text = "token,topic\naa,rider\nbb,rider\ncc,com.example.app\ndd,com.example.app\nee,com.example.app\n"
        let read = try ImportedText(text, usual)
        #expect(read.coverage.contains("  topic com.example.app: 3") && read.coverage.contains("  topic rider: 2"))
        #expect(
            read.coverage.last
                == "warning: the topic 'rider' is no bundle ID: say which it means, as in --topic-value rider=com.example.rider"
        )
        let named = try ImportedText(
            text,
            usual + ["--topic-value", "rider=com.example.app", "--topic-value", "com.example.app=com.example.app"])
        #expect(named.coverage.contains("  topic com.example.app: 5"))
        #expect(
            try ImportedText("token\naa\n", usual + ["--topic", "t"]).coverage.allSatisfy { !$0.contains("topic") })
        let many = "token,topic\n" + (1...60).map { "aa,com.example.a\($0)\n" }.joined()
        #expect(try ImportedText(many, usual).coverage.contains("  other topics: 50"))
    }

    @Test(arguments: [["--time-zone", "-05:00"], ["--time-zone=-05:00"]])
    func `a time zone may be west of Greenwich`(zone: [String]) throws {
        let options = try ImportOptions.parse(["--format", "csv"] + zone)
        #expect(try options.knownZone() == LocalTime(offset: -18_000))
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
