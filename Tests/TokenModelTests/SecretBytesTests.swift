import Testing

@testable import TokenModel

@Suite struct `Bytes of a secret` {
    @Test func `the first line has no mark of an encoding, and ends where the line does`() {
        for (file, line) in [
            ("a b\n", "a b"), ("\u{FEFF}pässword\r\nmore", "pässword"), ("\n", ""), ("", ""), ("x", "x"),
        ] {
            #expect(SecretBytes(Array(file.utf8)).firstLine.unprotected == Array(line.utf8))
        }
    }
}
