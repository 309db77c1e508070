import Foundation
import LedgerTestSupport
import Testing

@testable import tokenkeeperd

private func document(_ text: String) throws -> TOMLDocument { try TOMLDocument(Array(text.utf8)) }

private func refusal(_ bytes: [UInt8]) -> TOMLError? {
    do {
        _ = try TOMLDocument(bytes)
        return nil
    } catch {
        return error
    }
}

private let values = "a text in quotes, a whole number, true, false or an array of texts"
private let number = "a number that is not a whole decimal one of 64 bits, or a date"
private let escapes = #"\b, \t, \n, \f, \r, \", \\, \uXXXX or \UXXXXXXXX"#

@Suite struct `The configuration's TOML` {
    @Test func `comments, sections, keys and the four types are read`() throws {
        let text = """
            # ünïcode \t in a comment
            top = "a\\tb\\u00e9\\U0001F600\\"\\\\" # after a value
            'quo ted'."and.dotted" = 'C:\\no\\escapes'

            [ sweep . "inner" ]\t# after a section
            a.b = -0
            a.c=+1_000_000
            yes = true
            no = false
            none = []
            one = [ "x", ]
            many = [ # first
                "x", 'y',\t
                # between
                "#z"

            ] # last
            [sweep]
            -1_ = 9223372036854775807
            least = -9223372036854775808
            """
        for text in [text, text.replacingOccurrences(of: "\n", with: "\r\n"), text + "\n"] {
            let found = try document(text)
            let wanted: [([String], TOMLDocument.Value, Int)] = [
                (["top"], .text("a\tbé😀\"\\"), 2),
                (["quo ted", "and.dotted"], .text("C:\\no\\escapes"), 3),
                (["sweep", "inner", "a", "b"], .integer(0), 6),
                (["sweep", "inner", "a", "c"], .integer(1_000_000), 7),
                (["sweep", "inner", "yes"], .boolean(true), 8),
                (["sweep", "inner", "no"], .boolean(false), 9),
                (["sweep", "inner", "none"], .texts([]), 10),
                (["sweep", "inner", "one"], .texts(["x"]), 11),
                (["sweep", "inner", "many"], .texts(["x", "y", "#z"]), 12),
                (["sweep", "-1_"], .integer(.max), 19),
                (["sweep", "least"], .integer(.min), 20),
            ]
            #expect(found.entries == wanted.map { .init(key: $0.0, value: $0.1, line: $0.2) })
            #expect(found.sections == [.init(key: ["sweep", "inner"], line: 5), .init(key: ["sweep"], line: 18)])
        }
        for empty in ["", "\n", "#", " \t", "\r\n"] { #expect(try document(empty).entries.isEmpty) }
    }

    @Test(arguments: [
        // Inputs that crashed the process by an assertion of toml++.
        ("[<", "1:2: found '<', expected a key"),
        ("[*]", "1:2: found '*', expected a key"),
        ("[=]", "1:2: found '=', expected a key"),
        ("[,]", "1:2: found ',', expected a key"),
        ("[.sweep]", "1:2: found '.', expected a key"),
        ("[ä]", "1:2: found 'ä', expected a key"),
        // Keys and sections.
        ("[]", "1:2: found ']', expected a key"),
        ("[a", "1:3: found the end of the file, expected ] or a dot"),
        ("[a b]", "1:4: found 'b', expected ] or a dot"),
        ("[a.]", "1:4: found ']', expected a key"),
        ("[a]]", "1:4: found ']', expected the end of the line or a comment"),
        ("[a] b = 1", "1:5: found 'b', expected the end of the line or a comment"),
        ("[[a]]", "1:2: found '[', expected a key"),
        ("a", "1:2: found the end of the file, expected = or a dot"),
        ("a\n= 1", "1:2: found the end of the line, expected = or a dot"),
        ("= 1", "1:1: found '=', expected a key"),
        ("a..b = 1", "1:3: found '.', expected a key"),
        ("é = 1", "1:1: found 'é', expected a key"),
        ("a b = 1", "1:3: found 'b', expected = or a dot"),
        ("a = 1\na = 2", "2:1: found the key a for the second time, expected a new key"),
        ("a = 1\n'a' = 2", "2:1: found the key a for the second time, expected a new key"),
        ("a = 1\na.b = 2", "2:1: found a key inside a value, expected a new key"),
        ("[a]\n[ a ]", "2:1: found the section [a] for the second time, expected a new section"),
        ("a = 1\n[a]", "2:1: found a section named like a key before it, expected a new section"),
        ("a.b = 1\n[a]", "2:1: found a section named like a key before it, expected a new section"),
        ("a = 1\n[a.b]", "2:1: found a section inside a value, expected a new section"),
        (
            "[a.b]\n[a]\nb.c = 1",
            "3:1: found a key of a section that has a header of its own, expected a new key"
        ),
        ("a.b.c.d.e.f.g.h.i = 1", "1:1: found a key of more than 8 parts, expected a setting's key"),
        // Values.
        ("a =", "1:4: found the end of the file, expected \(values)"),
        ("a = \n", "1:5: found the end of the line, expected \(values)"),
        ("a = yes", "1:5: found 'y', expected \(values)"),
        ("a = True", "1:5: found 'T', expected \(values)"),
        ("a = 1 2", "1:7: found '2', expected the end of the line or a comment"),
        ("a = true false", "1:10: found 'f', expected the end of the line or a comment"),
        ("a = { b = 1 }", "1:5: found an inline table, expected \(values)"),
        ("a = postgresql://u:hunter2@h/db", "1:5: found 'p', expected \(values)"),
        ("  a = 1.5", "1:7: found \(number), expected \(values)"),
        ("a = 1e5", "1:5: found \(number), expected \(values)"),
        ("a = 0x10", "1:5: found \(number), expected \(values)"),
        ("a = 01", "1:5: found \(number), expected \(values)"),
        ("a = 1__0", "1:5: found \(number), expected \(values)"),
        ("a = _1", "1:5: found '_', expected \(values)"),
        ("a = 1_", "1:5: found \(number), expected \(values)"),
        ("a = +", "1:5: found \(number), expected \(values)"),
        ("a = -nan", "1:5: found \(number), expected \(values)"),
        ("a = 2026-11-22", "1:5: found \(number), expected \(values)"),
        ("a = 07:32:00", "1:5: found \(number), expected \(values)"),
        ("a = 9223372036854775808", "1:5: found \(number), expected \(values)"),
        ("a = inf", "1:5: found 'i', expected \(values)"),
        // Texts.
        ("a = \"b", "1:7: found the end of the file, expected the text from column 5 to end with \""),
        ("a = \"b\nc\"", "1:7: found the end of the line, expected the text to end with \" on its line"),
        ("a = 'b\r\n'", "1:7: found the end of the line, expected the text to end with ' on its line"),
        ("a = \"\"\"b\"\"\"", "1:5: found a text over several lines, expected a text in one pair of quotes"),
        ("a = '''b'''", "1:5: found a text over several lines, expected a text in one pair of quotes"),
        ("a = \"é\\q\"", "1:7: found an unknown escape, expected \(escapes)"),
        ("a = \"\\u12g4\"", "1:10: found 'g', expected 4 hexadecimal digits"),
        ("a = \"\\u１２３４\"", "1:8: found '１', expected 4 hexadecimal digits"),
        ("a = \"\\ud800\"", "1:6: found an escape that is not a character, expected a Unicode scalar value"),
        ("a = \"\\U00110000\"", "1:6: found an escape that is not a character, expected a Unicode scalar value"),
        ("a = \"\u{7}\"", "1:6: found U+0007, expected the text to end with \" on its line"),
        ("a = '\u{7F}'", "1:6: found U+007F, expected the text to end with ' on its line"),
        // Arrays.
        ("a = [", "1:6: found the end of the file, expected a text in quotes"),
        ("a = [\n\"b\"\n\"c\"]", "3:1: found '\"', expected a comma or ]"),
        ("a = [,]", "1:6: found ',', expected a text in quotes"),
        ("a = [1]", "1:6: found '1', expected a text in quotes"),
        ("a = [['b']]", "1:6: found '[', expected a text in quotes"),
        ("a = [\"b\",, ]", "1:10: found ',', expected a text in quotes"),
        // Characters.
        ("\u{FEFF}a = 1", "1:1: found a byte order mark, expected a key"),
        ("a = 1 # \u{0}", "1:9: found U+0000, expected a comment without control characters"),
        ("a = 1\rb = 2", "1:6: found U+000D, expected the end of the line or a comment"),
        ("a = 1 # b\rc", "1:10: found U+000D, expected a comment without control characters"),
        ("\u{A0}a = 1", "1:1: found a blank that is not ASCII, expected a key"),
        ("a = \u{202E}", "1:5: found U+202E, expected \(values)"),
    ])
    func `everything else is refused, with line, column, what was found and what is expected`(
        text: String, error: String
    ) {
        #expect(refusal(Array(text.utf8))?.description == error)
    }

    @Test func `invalid UTF-8 is refused at its first byte`() {
        for (bytes, line, column) in [
            ([0xFF], 1, 1), (Array("a = 1\r\nö = \"".utf8) + [0xC3], 2, 6),
            (Array("é".utf8) + [0xED, 0xA0, 0x80], 1, 2),
            ([0xC0, 0x80], 1, 1), ([0xF0, 0x9F, 0x98], 1, 1),
        ] as [([UInt8], Int, Int)] {
            let found = refusal(bytes)
            #expect(found?.found == "a byte that is not UTF-8")
            #expect(found?.line == line && found?.column == column)
        }
    }

    @Test func `neither length nor depth crashes the process`() {
        let deep = String(repeating: "[", count: 100_000)
        #expect(refusal(Array(deep.utf8))?.column == 2)
        #expect(refusal(Array(("a = " + deep).utf8))?.column == 6)
        #expect(refusal(Array(("a = " + String(repeating: "{a=", count: 100_000)).utf8))?.column == 5)
        let long = Array(repeating: "a", count: 20_000).joined(separator: ".")
        for text in ["[\(long)]", "\(long) = 1", long] {
            #expect(refusal(Array(text.utf8))?.found == "a key of more than 8 parts")
        }
        #expect(
            refusal([UInt8](repeating: 0x0A, count: TOMLScanner.maximumSize + 1))?.found == "a file of more than 1 MiB")
        #expect(refusal([UInt8](repeating: 0x0A, count: TOMLScanner.maximumSize)) == nil)
    }

    @Test func `input beyond a limit is refused where the limit is passed`() throws {
        let tooLong = "found a part of a key of more than 100 bytes, expected a setting's key"
        let part = String(repeating: "a", count: 100)
        #expect(try document("[\(part)]\n'\(part)' = 1").entries.map(\.key) == [[part, part]])
        let long = String(repeating: "a", count: 40_000)
        let lines = (1...20_000).map { "k\($0)=1\n" }.joined()
        #expect(
            refusal(Array("[\"\(long)\"]\n\(lines)".utf8))?.description
                == "1:2: found a text of more than 16 KiB, expected a shorter one")
        #expect(refusal(Array("[\(long)]\n\(lines)".utf8))?.description == "1:2: \(tooLong)")
        #expect(refusal(Array("[a]\nb . '\(part)a' = 1".utf8))?.description == "2:5: \(tooLong)")
        #expect(refusal(Array("a = 1\n\(part)b = 1".utf8))?.description == "2:1: \(tooLong)")

        let text = String(repeating: "é", count: TOMLScanner.maximumText / 2)
        #expect(try document("a = \"\(text)\"").entries.map(\.value) == [.text(text)])
        #expect(
            refusal(Array("a = [\"\", \"\(text)b\"]".utf8))?.description
                == "1:10: found a text of more than 16 KiB, expected a shorter one")

        let many = "found more than 10000 keys and sections, expected fewer"
        #expect(try document((1...10000).map { "k\($0)=1\n" }.joined() + "# a comment").entries.count == 10000)
        #expect(refusal(Array(lines.utf8))?.description == "10001:1: \(many)")
        #expect(refusal(Array((1...20000).map { "[s\($0)]\n k=1\n" }.joined().utf8))?.description == "10001:1: \(many)")
    }

    private static let rich = """
        database_url = "postgresql://u:hunter2@h/db" # é
        [sweep]
        interval = '2h'
        batch = 4_000
        [drain]
        queue_truncate = false
        lock_timeout = "1\\u00302ms"
        [credential.main]
        key_file = "AuthKey.p8"
        key_id = "ABC1234567"
        team_id = "TEAM123456"
        topics = [
            "com.example.app", # first
            "com.example.*",
        ]

        """

    private static let pieces: [[UInt8]] =
        [
            "[<", "[*]", "[=]", "[,]", "[.sweep]", "[ä]", "[[", "]]", "\"\"\"", "'''", "{", "}", "\\u", "\\U0011", "=",
            ".", "#", "\r",
            "\n", "\r\n", "true", "-1", "1.5", "nan", "\u{FEFF}", "\u{0}", "\u{202E}", "hunter2", "a.b.c = 1\n",
            "[sweep]\n",
        ].map { Array($0.utf8) } + [[0xC3], [0xFF], [0xF0, 0x9F], Array(repeating: 0, count: 40), Array("[".utf8)]

    /// If `TOML_MUTATIONS` is set, also writes the files to that folder, to compare with another parser.
    @Test func `ten thousand mutated files are read or refused, and no refusal repeats a value`() throws {
        let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../..")
        let defaultValue = try [UInt8](Data(contentsOf: root.appendingPathComponent("systemd/tokenkeeperd.toml")))
        let uncommented = String(decoding: defaultValue, as: UTF8.self).split(separator: "\n").map { line in
            line.hasPrefix("#") && !line.hasPrefix("# ") ? String(line.dropFirst()) : String(line)
        }.joined(separator: "\n")
        let samples = [defaultValue, Array(uncommented.utf8)] + Array(repeating: Array(Self.rich.utf8), count: 10)
        let folder = ProcessInfo.processInfo.environment["TOML_MUTATIONS"]
        var dice = SeededChance(seed: 16)
        var (accepted, refused) = (0, 0)
        for round in 0..<10_000 {
            var bytes = samples[round % samples.count]
            for _ in 0...Int.random(in: 0...2, using: &dice) {
                let place = Int.random(in: 0...bytes.count, using: &dice)
                switch Int.random(in: 0..<5, using: &dice) {
                case 0: bytes.insert(contentsOf: Self.pieces.randomElement(using: &dice) ?? [], at: place)
                case 1 where place < bytes.count: bytes[place] = UInt8.random(in: 0...255, using: &dice)
                case 2 where place < bytes.count: bytes.remove(at: place)
                case 3: bytes.removeSubrange(place..<min(bytes.count, place + Int.random(in: 0...30, using: &dice)))
                case 4 where round % 50 == 0: bytes.removeLast(bytes.count - place)
                default:
                    let piece = bytes[place..<min(bytes.count, place + Int.random(in: 0...30, using: &dice))]
                    bytes.insert(contentsOf: piece, at: Int.random(in: 0...bytes.count, using: &dice))
                }
            }
            let found = Result { () throws(TOMLError) in try TOMLDocument(bytes) }
            if let folder { try Self.write(bytes, found, to: "\(folder)/\(round)") }
            switch found {
            case .success: accepted += 1
            case .failure(let error):
                refused += 1
                #expect(error.line >= 1 && error.line <= bytes.count { $0 == 0x0A } + 1)
                #expect(error.column >= 1 && error.column <= bytes.count + 1)
                #expect(!error.description.contains("hunter") && error.description.utf8.allSatisfy { $0 >= 0x20 })
            }
            // The code that makes settings of it must not trap either.
            _ = try? Configuration(
                files: [ConfigurationText(contents: bytes, name: "t.toml")], environment: [:], flags: [])
        }
        #expect(accepted > 500 && refused > 500, "\(accepted) accepted, \(refused) refused")
    }

    private static func write(_ bytes: [UInt8], _ found: Result<TOMLDocument, TOMLError>, to path: String) throws {
        try Data(bytes).write(to: URL(fileURLWithPath: path + ".toml"))
        guard case .success(let document) = found else { return }
        let entries = document.entries.map { entry -> [String: Any] in
            let value: Any =
                switch entry.value {
                case .text(let text): text
                case .integer(let number): number
                case .boolean(let boolean): boolean
                case .texts(let texts): texts
                }
            return ["key": entry.key, "value": value]
        }
        let sections = document.sections.map(\.key)
        try JSONSerialization.data(withJSONObject: ["entries": entries, "sections": sections])
            .write(to: URL(fileURLWithPath: path + ".json"))
    }
}
