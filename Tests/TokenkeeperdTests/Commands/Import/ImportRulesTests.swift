import Testing
import TokenLedger
import TokenModel

@testable import tokenkeeperd

@Suite struct `Rules of an import` {
    private func instant(_ text: String, _ form: TimeText.Form = .auto, zone: LocalTime = .utc) -> String? {
        let bytes = Array(text.utf8)
        guard let instant = TimeText(form: form, zone: zone).instant(bytes, 0..<bytes.count) else { return nil }
        var copy = CopyText()
        copy.instant(instant)
        return String(decoding: copy.bytes, as: UTF8.self)
    }

    @Test func `times are ISO 8601, or numbers whose digits say the unit`() {
        let tokyo = LocalTime(offset: 32_400)
        #expect(instant("2024-02-29") == "2024-02-29 00:00:00+00")
        #expect(instant("2024-05-31T19:46:12.4770547Z") == "2024-05-31 19:46:12.477054+00")
        #expect(instant("2024-05-31 19:46:12+05:30") == "2024-05-31 14:16:12+00")
        #expect(instant("2024-05-31 19:46:12.5-08") == "2024-06-01 03:46:12.500000+00")
        #expect(instant("2024-05-31 19:46 UTC") == "2024-05-31 19:46:00+00")
        #expect(instant("2024-05-31 19:46", zone: tokyo) == "2024-05-31 10:46:00+00")
        #expect(instant("2024-05-31 19:46Z", zone: tokyo) == "2024-05-31 19:46:00+00")
        #expect(instant("1735786800") == "2025-01-02 03:00:00+00")
        #expect(instant("1735786800.25") == "2025-01-02 03:00:00.250000+00")
        #expect(instant("1735786800000") == "2025-01-02 03:00:00+00")
        #expect(instant("1735786800000000") == "2025-01-02 03:00:00+00")
        #expect(
            instant("99999999999") == "5138-11-16 09:46:39+00" && instant("100000000000") == "1973-03-03 09:46:40+00")
        #expect(instant("1735786800", .milliseconds) == "1970-01-21 02:09:46.800000+00")
        #expect(instant("1735786800", .iso) == nil && instant("2024-02-29", .seconds) == nil)
        #expect(instant("1900-03-01") == "1900-03-01 00:00:00+00")
        for wrong in [
            "", "x", "2023-02-29", "2024-13-01", "2024-00-01", "0000-00-00 00:00:00", "2024-05-31T24:00:00Z",
            "2024-05-31T1:00",
            "2024-05-31 19:46:12 CEST", "20240531T194612Z", "-5", "1e9", "31/05/2024", "2024-05-31T10:00:00.Z",
            "999999999999999999",
        ] {
            #expect(instant(wrong) == nil, "\(wrong)")
        }
        #expect(
            TimeText.offset("+09:00") == 32_400 && TimeText.offset("-0330") == -12_600 && TimeText.offset("9") == nil)
    }

    @Test func `a local time without a zone has the offset of its day, and one that came twice is the later`() {
        // Berlin in 2024: CEST from 03-31 01:00 to 10-27 01:00 UTC.
        let berlin = LocalTime([
            .init(since: .min, seconds: 3600), .init(since: 1_711_846_800, seconds: 7200),
            .init(since: 1_729_990_800, seconds: 3600),
        ])
        for (local, utc) in [
            ("1999-01-01 12:00", "1999-01-01 11:00:00+00"), ("2024-03-31 01:59", "2024-03-31 00:59:00+00"),
            ("2024-03-31 02:30", "2024-03-31 01:30:00+00"), ("2024-03-31 03:00", "2024-03-31 01:00:00+00"),
            ("2024-07-01 12:00", "2024-07-01 10:00:00+00"), ("2024-10-27 01:59", "2024-10-26 23:59:00+00"),
            ("2024-10-27 02:30", "2024-10-27 01:30:00+00"), ("2024-10-27 03:00", "2024-10-27 02:00:00+00"),
        ] {
            #expect(instant(local, zone: berlin) == utc, "\(local)")
        }
    }

    private func refusal(_ cells: String, _ more: [String] = []) throws -> String? {
        let read = try ImportedText(
            "token,topic,environment,registered_at,device_id,tags,unregistered\n\(cells)\n", ["--format", "csv"] + more)
        #expect(read.rows.count + read.refused.count == 1)
        return read.refused.first
    }

    @Test func `a row that cannot be understood is refused, with the cause`() throws {
        let long = String(repeating: "x", count: 513)
        #expect(try refusal("aa,t,,,,,") == nil)
        #expect(try refusal("aa,,,,,,") == "2 the topic is missing; see --topic")
        #expect(try refusal(",t,,,,,") == "2 the token is empty")
        #expect(
            try refusal("aa,\(long),,,,,")
                == "2 the topic is no apns-topic header: it is 513 bytes long, expected at most 512")
        for topic in [" ", "com example", "t\t", "tü"] {
            #expect(
                try refusal("aa,\(topic),,,,,")?.hasPrefix("2 the topic is no apns-topic header: it has a blank or")
                    == true, "\(topic)")
        }
        // The daemon leaves out what cannot be kept: one function judges that for all.
        #expect(try refusal("aa,t,,,\(long),,") == nil)
        #expect(try refusal("aa,t,,,,\(long),") == nil)
        #expect(try refusal("aa,t,,,,\"{a,NULL}\",") == nil)
        #expect(try refusal("aa,t,,,,\"{a,,b}\",")?.hasPrefix("2 tags is not a list; to leave it out:") == true)
        #expect(try refusal("aa,t,,,,,maybe")?.hasPrefix("2 unregistered is neither true nor false") == true)
        #expect(try refusal("aa,t,dev,,,,")?.hasPrefix("2 the environment is unknown: \"dev\"") == true)
        #expect(try refusal("aa,t,dev,,,,", ["--environment-value", "dev=sandbox"]) == nil)
        #expect(try refusal("aa,t,,2999-01-01,,,")?.hasPrefix("2 the time is in the future") == true)
        #expect(try refusal("abc,t,,,,,")?.hasPrefix("2 token is 'abc'") == true)
    }

    @Test func `bytes that are not UTF-8, and zero bytes, are refused`() throws {
        for byte: UInt8 in [0x00, 0xFF, 0xC3] {
            let read = try ImportedText(
                Array("token,device_id\naa,x".utf8) + [byte] + Array("\nbb,ü\n".utf8),
                ["--format", "csv", "--topic", "t"])
            #expect(read.rows.count == 1 && read.refused.count == 1, "\(byte)")
        }
    }

    @Test func `what names a token in a cause is cut`() throws {
        let token = String(repeating: "ab", count: 32)
        let read = try ImportedText("token,registered_at\n\(token),\(token)\n", ["--format", "csv", "--topic", "t"])
        #expect(read.refused.count == 1 && !read.refused[0].contains(token.prefix(21)), "\(read.refused)")
    }

    @Test func `causes are counted without what is peculiar to a row`() throws {
        let read = try ImportedText("token\nabc\nabd\n\"\"\n", ["--format", "csv", "--topic", "t"])
        #expect(read.details == ["  refused 2: the token is no token: odd", "  refused 1: the token is empty"])
    }

    @Test(arguments: [
        ("6LwWPILuVjDOo9zLyfKBtUKYv0Um9d3h4vAMTVoyKTM", true), ("6LwWPILuVjDOo9zLyfKBtUKYv0Um9d3h4vAMTVoyKTM=", true),
        ("6LwWPILuVjDOo9zLyfKB_-", true), ("6LwWPILuVjDOo9zLyfKB=", false), ("6LwWPILuVjDOo9zLyfKBt", false),
        ("6LwWPILuVjDOo9zLyfKB:x", false), ("6LwWPILu", false),
    ]) func `a token that is no hex may be base64, which the cause says`(token: String, isBase64: Bool) throws {
        func causes(_ problem: String, _ expected: String) throws -> ImportedText {
            try ImportedText(Array("token\n\(token)\n".utf8), ["--format", "csv", "--topic", "t"]) {
                .fault("token is '\($0.prefix(8))'... (\($0.count) characters)\(problem), expected \(expected)")
            }
        }
        let read = try causes("", "1 to 512 bytes in hex")
        let hint = "; it may be base64: see --token-form"
        #expect(read.refused.count == 1 && read.refused[0].hasSuffix("in hex" + (isBase64 ? hint : "")))
        #expect(read.details == ["  refused 1: the token is no token" + (isBase64 ? hint : "")])
        for (problem, expected) in [(": a UUID", "hex"), ("", "hex or base64")] {
            #expect(try !causes(problem, expected).refused[0].contains(hint))
        }
    }

    @Test func `in base64, hex digits may be something else unless there are 32`() throws {
        let text = "token\nabcdef01\n\(String(repeating: "a", count: 32))\n"
        let read = try ImportedText(text, ["--format", "csv", "--topic", "t", "--token-form", "base64"])
        #expect(read.rows.count == 1 && read.refused.count == 1)
    }

    @Test func `a position survives being written, and another release's is none`() {
        var position = ImportPosition(identity: "12-ab-cd")
        position.offset = 5
        position.rejects = 7
        #expect(ImportPosition(position.text) == position)
        #expect(ImportPosition("file=1 offset=x") == nil && ImportPosition("4711") == nil)
    }
}
