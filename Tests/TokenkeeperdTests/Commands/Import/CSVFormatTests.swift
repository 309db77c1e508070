import Testing

@testable import tokenkeeperd

@Suite struct `Import of CSV` {
    private let usual = ["--format", "csv", "--topic", "t"]

    private func tokens(_ text: String, _ more: [String] = [], piece: Int = 7) throws -> [String] {
        try ImportedText(text, usual + more, piece: piece).rows.map { String($0.split(separator: "\t").last ?? "") }
    }

    @Test(arguments: [1, 2, 3, 1000])
    func `a file reads the same in pieces of any size`(piece: Int) throws {
        let text = "\u{FEFF}token,device_id,note\r\naa,\"x\"\"y\",\r\n\r\nbb,b,\"two\r\nlines\"\ncc,plain,"
        let read = try ImportedText(text, usual, piece: piece)
        #expect(
            read.rows == [
                "production\tt\t2026-01-01 00:00:00+00\tx\"y\t\\N\t\\N\tf\t7\taa",
                "production\tt\t2026-01-01 00:00:00+00\tb\t\\N\t\\N\tf\t7\tbb",
                "production\tt\t2026-01-01 00:00:00+00\tplain\t\\N\t\\N\tf\t7\tcc",
            ])
        #expect(read.refused == [])
        #expect(read.position.offset == Int64(text.utf8.count) && read.position.records == 3)
    }

    @Test func `a quote that is never closed costs its own line`() throws {
        let read = try ImportedText("token,device_id\naa,\"x\nbb,y\ncc,\"z\"\n", usual)
        #expect(read.rows.map { $0.suffix(2) } == ["bb", "cc"])
        #expect(read.refused == ["2 text follows a closing quote"])
        let last = try ImportedText("token,device_id\naa,\"x\nbb,y", usual)
        #expect(last.rows.map { $0.suffix(2) } == ["bb"] && last.refused == ["2 a quote is not closed"])
    }

    @Test func `a quote that is closed by the next broken line costs both lines and none between`() throws {
        let read = try ImportedText("token,device_id\naa,\"x\nbb,y\ncc,\"\ndd,z\n", usual)
        #expect(read.rows.map { $0.suffix(2) } == ["bb", "dd"])
        #expect(read.refused.map { $0.prefix(1) } == ["2", "4"])
    }

    @Test func `a record longer than 1 MiB costs only its own line`() throws {
        let long = String(repeating: "x", count: 3 << 20)
        let read = try ImportedText("token,device_id\naa,\"\(long)\nbb,y\n", usual, piece: 1 << 16)
        #expect(read.rows.map { $0.suffix(2) } == ["bb"])
        #expect(read.refused.allSatisfy { $0.hasPrefix("2 ") } && !read.refused.isEmpty)
    }

    @Test func `columns are found by name, whatever their order, and by number`() throws {
        #expect(try tokens("id,Token\n1,aa\n") == ["aa"])
        #expect(try tokens("id;push\n1;aa\n", ["--column", "token=push", "--delimiter", ";"]) == ["aa"])
        #expect(
            try tokens("1\taa\n2\tbb\n", ["--no-header", "--column", "token=2", "--delimiter", "tab"]) == ["aa", "bb"])
        #expect(throws: ImportProblem.self) { try tokens("id,push\n1,aa\n") }
        #expect(throws: ImportProblem.self) { try tokens("token,token\naa,bb\n") }
        #expect(throws: (any Error).self) { try tokens("", ["--no-header"]) }
        #expect(throws: (any Error).self) { try tokens("", ["--column", "key=x"]) }
    }

    @Test func `blanks around a name of the header do not hide a column`() throws {
        for header in ["token, device_id, registered_at", "token,\" device_id\",\"registered_at \""] {
            let read = try ImportedText("\(header)\naa,d,2025-01-02\n", usual)
            #expect(read.rows == ["production\tt\t2025-01-02 00:00:00+00\td\t\\N\t\\N\tf\t7\taa"])
        }
        let named = ["--column", "token= push", "--filter", "os=ios"]
        #expect(try tokens("id, push, os\n1,aa,ios\n", named) == ["aa"])
        // A column without a name is none of a field that is left out.
        let nameless = try ImportedText("token,\naa,x\n", usual + ["--column", "tags="])
        #expect(
            nameless.rows[0].contains("\\N\t\\N\t\\N\tf") && nameless.coverage.allSatisfy { !$0.contains("not read") })
    }

    @Test(arguments: ["registered_at,registered_at", "unregistered,Unregistered", "Token,x"])
    func `a field comes from one column only`(columns: String) throws {
        #expect(throws: ImportProblem.self) { try ImportedText("token,\(columns)\naa,,\n", usual) }
        let named = try ImportedText(
            "token,Unregistered,unregistered\naa,1,\n", usual + ["--column", "unregistered=Unregistered"])
        #expect(named.rows[0].contains("\tt\t7"))
    }

    @Test func `columns that nothing is read from, and rows without a time, are told`() throws {
        let read = try ImportedText("token,is_active,lastSeen,active\naa,f,2024-01-01,f\n", usual)
        #expect(
            read.coverage == [
                "  not read: is_active, lastSeen, active",
                "  registered_at: in 0 of 1 row; rows without it count as registered at 2026-01-01 00:00:00+00 (when the file was written)",
                "  tokens of 2 hex digits: 1",
            ])
        let turned = "token,logged_out\n" + (1...6).map { "0\($0),t\n" }.joined()
        #expect(
            try ImportedText(turned, usual + ["--column", "unregistered=logged_out"]).coverage.contains(
                "  logs out 6 tokens: is this the flag of those that are active?"))
        let some = try ImportedText(
            "token,registered_at\naa,2024-01-01\nbb,-\n", usual + ["--as-of", "2025-01-01", "--null", "-"])
        #expect(
            some.coverage.first
                == "  registered_at: in 1 of 2 rows; rows without it count as registered at 2025-01-01 00:00:00+00 (--as-of)"
        )
        // The cause in a file of refused rows is nobody's column.
        let again = try ImportedText(ImportedText("token,more\nzz,1\n", usual).rejects, usual)
        #expect(again.coverage == ["  not read: more"])
        let wide = "token," + (1...40).map { "c\($0)" }.joined(separator: ",")
        #expect(try ImportedText(wide + "\n", usual).coverage.first?.hasSuffix(", c29, c30, …") == true)
    }

    @Test func `a token may have a line break at its end, and no other value may have one`() throws {
        let read = try ImportedText("token,device_id\n\"aa\n\",x\n\"bb\r\n\",y\ncc,z\n", usual)
        #expect(read.rows.map { $0.suffix(2) } == ["aa", "bb", "cc"] && read.refused == [])
        #expect(read.position.lines == 6)
        for text in ["aa,\"x\n\"\n", "\"aa\nbb\",x\n"] {
            #expect(try ImportedText("token,device_id\n" + text, usual).refused.count == 2, "\(text)")
        }
    }

    @Test func `all lengths of tokens are told, or how many have another`() throws {
        let lines = (1...12).map { String(repeating: "ab", count: $0) + "\n" }.joined()
        let few = try ImportedText("token\naa\naabb\naabbcc\naabbccdd\n", usual)
        #expect(few.coverage.count { $0.contains("tokens of") } == 4, "\(few.coverage)")
        let many = try ImportedText("token\naa\n" + lines, usual)
        #expect(many.coverage[1] == "  tokens of 2 hex digits: 2")
        #expect(many.coverage.count == 12 && many.coverage[11] == "  tokens of other lengths: 2")
    }

    @Test func `the file of refused rows reads as the rows did, and as a third file`() throws {
        let lines = "aa,\"x\nzz,y\n\"yy\",\"two\nlines\"\nbb\n"
        for (header, more) in [
            ("token,device_id\n", []), ("", ["--no-header", "--column", "token=1", "--column", "device_id=2"]),
        ] {
            let first = try ImportedText(header + lines, usual + more)
            #expect(first.refused.count == 5 && first.rows == [], "\(first.refused)")
            let second = try ImportedText(first.rejects, usual + more)
            // Only the causes may differ: what is left of a record of several lines is broken otherwise.
            #expect(second.refused.count == 5 && second.rows == [], "\(first.rejects)")
            let cause = /"tokenkeeperd: line [^"]*"/
            #expect(second.rejects.replacing(cause, with: "") == first.rejects.replacing(cause, with: ""))
            let fixed = try ImportedText(first.rejects.replacing("zz", with: "cc"), usual + more)
            #expect(fixed.rows.map { $0.suffix(2) } == ["cc"] && fixed.refused.count == 4)
        }
    }

    @Test func `a filter passes the rows with one of its values, and says what the others have`() throws {
        let text = "token,platform,app\naa,ios,1\n\"f:APA91\",android,1\nbb,iOS,1\ncc,ios,2\ndd,,1\n"
        let both = try ImportedText(
            text, usual + ["--filter", "platform=ios", "--filter", "platform=iOS", "--filter", "app=1"])
        #expect(both.rows.map { $0.suffix(2) } == ["aa", "bb"] && both.refused == [])
        #expect(
            both.details == [
                "  skipped 1: app is \"2\"", "  skipped 1: platform is \"android\"", "  skipped 1: platform is empty",
            ])
        let empty = try ImportedText(text, usual + ["--filter", "platform="])
        #expect(empty.rows.map { $0.suffix(2) } == ["dd"])
        let null = try ImportedText("token,gone\naa,\\N\nbb,x\n", usual + ["--filter", "gone=", "--null", "\\N"])
        #expect(null.rows.map { $0.suffix(2) } == ["aa"])
        // A column may be a field, too.
        let field = try ImportedText("token,user_id\naa,u\nbb,v\n", usual + ["--filter", "user_id=u"])
        #expect(field.rows.map { $0.suffix(2) } == ["aa"] && field.rows[0].contains("\tu\t"))
        let numbered = try ImportedText(
            "aa,ios\nbb,x\n", usual + ["--no-header", "--column", "token=1", "--filter", "2=ios"])
        #expect(numbered.rows.map { $0.suffix(2) } == ["aa"])
        #expect(throws: ImportProblem.self) { try tokens(text, ["--filter", "os=ios"]) }
        for wrong in ["ios", "=ios"] {
            #expect(throws: (any Error).self) { try tokens(text, ["--filter", wrong]) }
        }
    }

    @Test func `a column of a field's name is left out on request`() throws {
        let text = "token,tags\naa,\"{\"\"team\"\":\"\"red\"\"}\"\n"
        #expect(try ImportedText(text, usual).refused[0].contains("--column tags="))
        #expect(try tokens(text, ["--column", "tags="]) == ["aa"])
        #expect(throws: (any Error).self) {
            try tokens(text, ["--column", "user_id=tags", "--column", "device_id=tags"])
        }
    }

    @Test func `an absent value is an empty one, or the text for null`() throws {
        let read = try ImportedText("token,device_id,registered_at\naa,\\N,\\N\nbb,,\n", usual + ["--null", "\\N"])
        #expect(read.rows.allSatisfy { $0.contains("\t2026-01-01 00:00:00+00\t\\N\t\\N\t\\N\tf\t7\t") })
        #expect(read.rows.count == 2)
    }

    @Test(arguments: ["csv", "json"]) func `the end of a line that is too long is no line`(format: String) throws {
        let token = String(repeating: "ab", count: 32)
        let long = String(repeating: "a", count: PartEnd.longestRecord)
        // What follows the first MiB would be a record.
        let (tail, last) = format == "csv" ? (token, "cd") : ("{\"token\":\"\(token)\"}", "{\"token\":\"cd\"}")
        let head = format == "csv" ? "token\n" : ""
        for end in ["\n\(last)\n", ""] {
            for repeated in [1, 3] {
                let text = head + String(repeating: long, count: repeated) + tail + end
                let read = try ImportedText(text, ["--format", format, "--topic", "t"], piece: 1 << 19)
                #expect(read.refused.count == 1 && read.refused[0].contains("longer than 1 MiB"), "\(read.refused)")
                #expect(read.rows.count == (end.isEmpty ? 0 : 1) && read.rows.allSatisfy { $0.hasSuffix("\tcd") })
                #expect(read.position.offset == text.utf8.count)
                #expect(read.position.records == (end.isEmpty ? 1 : 2))
            }
        }
    }
}
