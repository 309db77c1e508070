internal import Glibc
public import TokenModel

/// A private key or a certificate as people pass it on: through an environment variable, a web form, a JSON file, PowerShell. Undoes what is unambiguous.
///
/// Works on copies of the file's bytes, and wipes those that it makes itself.
public enum KeyText {
    /// The key as PEM; nil if nothing in the file looks like one.
    static func pem(in file: SecretBytes) -> SecretBytes? {
        var text = plain(file).unprotected
        defer { wipe(&text) }
        if let pem = relined(text) { return pem }
        guard looksLikeKey(text) else { return nil }
        // SEC1 has version 1, and PKCS#8 version 0.
        let label = version(ofSequence: text) == 1 ? "EC PRIVATE KEY" : "PRIVATE KEY"
        return PEMBlock.text(label: label, content: SecretBytes(text))
    }

    /// What a file is that has no PEM; nil for anything else.
    static func kind(of file: SecretBytes) -> String? {
        var text = plain(file).unprotected
        defer { wipe(&text) }
        func has(_ mark: String) -> Bool { place(of: mark, in: text, from: 0) != nil }
        if text.starts(with: Array("PK".utf8) + [3, 4]) { return "a zip archive was found: unpack it" }
        if version(ofSequence: text) == 3 {
            return "a PKCS#12 file was found: it belongs in certificate_file; as a key"
        }
        if text.starts(with: [0x30, 0x82]), text.count > 4, text[4] == 0x30 {
            return "a certificate was found, expected a private key"
        }
        if let first = text.first(where: { $0 > 0x20 }), first == UInt8(ascii: "<"),
            has("<html") || has("<HTML") || has("<!")
        {
            return "a web page was found: the download has failed"
        }
        if has("BEGIN%20") || has("BEGIN+") || has("%0A") { return "the text is URL-encoded" }
        if has("BEGIN "), has("\u{2014}") || has("\u{2013}") {
            return "a text program has replaced the hyphens around BEGIN and END by dashes"
        }
        return nil
    }

    /// The version with which a DER sequence begins; nil if it is none, or begins otherwise.
    private static func version(ofSequence bytes: [UInt8]) -> UInt8? {
        guard bytes.count > 8, bytes[0] == 0x30 else { return nil }
        let start = bytes[1] < 0x80 ? 2 : 2 + Int(bytes[1] & 0x7f)
        guard start + 2 < bytes.count, bytes[start] == 2, bytes[start + 1] == 1 else { return nil }
        return bytes[start + 2]
    }

    /// A file as it was before it became UTF-16 or base64, or before its lines were joined by a backslash and an n. Any other file stays as it is.
    public static func plain(_ file: SecretBytes) -> SecretBytes {
        var text = file.unprotected
        defer { wipe(&text) }
        let wasWide = isWide(text)
        if wasWide { text.removeAll { $0 == 0 || $0 >= 0x80 } }
        if place(of: "-----BEGIN ", in: text, from: 0) != nil {
            guard place(of: "\\n", in: text, from: 0) != nil else { return wasWide ? SecretBytes(text) : file }
            var lines: [UInt8] = []
            lines.reserveCapacity(text.count)
            defer { wipe(&lines) }
            var isEscape = false
            for byte in text {
                switch byte {
                case UInt8(ascii: "\\"): isEscape = true
                case UInt8(ascii: "n") where isEscape, UInt8(ascii: "r") where isEscape,
                    UInt8(ascii: "t") where isEscape:
                    lines.append(0x0A)
                    isEscape = false
                // Around the whole, as in JSON.
                case UInt8(ascii: "\""), UInt8(ascii: "'"): isEscape = false
                default:
                    lines.append(byte)
                    isEscape = false
                }
            }
            return SecretBytes(lines)
        }
        guard var decoded = base64(text) else { return file }
        defer { wipe(&decoded) }
        return SecretBytes(decoded)
    }

    /// UTF-16: every other byte is 0.
    private static func isWide(_ text: [UInt8]) -> Bool {
        let zeros = text.count { $0 == 0 }
        return zeros * 5 > text.count * 2 && text.first != 0x30
    }

    /// A DER sequence: PKCS#8 without PEM around it.
    private static func looksLikeKey(_ bytes: [UInt8]) -> Bool {
        guard bytes.count >= 64, bytes[0] == 0x30 else { return false }
        return bytes[1] == 0x81 ? bytes.count == Int(bytes[2]) + 3 : bytes[1] < 0x80 && bytes.count == Int(bytes[1]) + 2
    }

    /// The first block whose lines were joined, or ended by something else: a backslash and an n, blanks, quotation marks.
    private static func relined(_ text: [UInt8]) -> SecretBytes? {
        guard let begin = place(of: "-----BEGIN ", in: text, from: 0),
            let labelEnd = place(of: "-----", in: text, from: begin + 11),
            labelEnd - begin < 60
        else { return nil }
        let label = String(decoding: text[(begin + 11)..<labelEnd], as: UTF8.self)
        guard let end = place(of: "-----END \(label)-----", in: text, from: labelEnd + 5) else { return nil }
        var body: [UInt8] = []
        defer { wipe(&body) }
        var isEscape = false
        for byte in text[(labelEnd + 5)..<end] {
            if byte == UInt8(ascii: "\\") {
                isEscape = true
            } else if isEscape, [UInt8(ascii: "n"), UInt8(ascii: "r"), UInt8(ascii: "t")].contains(byte) {
                isEscape = false
            } else if isBase64(byte) {
                isEscape = false
                body.append(byte)
            }
        }
        let (first, last) = (Array("-----BEGIN \(label)-----\n".utf8), Array("\n-----END \(label)-----\n".utf8))
        return unsafe SecretBytes(count: first.count + body.count + last.count) { memory in
            unsafe memory.copyBytes(from: first)
            unsafe UnsafeMutableRawBufferPointer(rebasing: memory[first.count...]).copyBytes(from: body)
            unsafe UnsafeMutableRawBufferPointer(rebasing: memory[(first.count + body.count)...]).copyBytes(from: last)
        }
    }

    private static func place(of mark: String, in text: [UInt8], from start: Int) -> Int? {
        let mark = Array(mark.utf8)
        guard start <= text.count - mark.count else { return nil }
        return (start...(text.count - mark.count)).first { text[$0] == mark[0] && text[$0...].starts(with: mark) }
    }

    private static func isBase64(_ byte: UInt8) -> Bool { byte == UInt8(ascii: "=") || value(of: byte) != nil }

    private static func value(of byte: UInt8) -> UInt32? {
        switch byte {
        case UInt8(ascii: "A")...UInt8(ascii: "Z"): UInt32(byte - UInt8(ascii: "A"))
        case UInt8(ascii: "a")...UInt8(ascii: "z"): UInt32(byte - UInt8(ascii: "a") + 26)
        case UInt8(ascii: "0")...UInt8(ascii: "9"): UInt32(byte - UInt8(ascii: "0") + 52)
        case UInt8(ascii: "+"): 62
        case UInt8(ascii: "/"): 63
        default: nil
        }
    }

    /// Nil if anything but base64, blanks and quotation marks is in it.
    private static func base64(_ text: [UInt8]) -> [UInt8]? {
        var decoded: [UInt8] = []
        decoded.reserveCapacity(text.count)
        var (bits, count): (UInt32, Int) = (0, 0)
        for byte in text {
            if let value = value(of: byte) {
                bits = bits << 6 | value
                count += 6
                if count >= 8 {
                    count -= 8
                    decoded.append(UInt8(truncatingIfNeeded: bits >> UInt32(count)))
                }
            } else if ![0x09, 0x0A, 0x0D, 0x20, UInt8(ascii: "="), UInt8(ascii: "\""), UInt8(ascii: "'")].contains(byte)
            {
                wipe(&decoded)
                return nil
            }
        }
        return decoded.isEmpty ? nil : decoded
    }

    private static func wipe(_ bytes: inout [UInt8]) {
        unsafe bytes.withUnsafeMutableBytes { memory in
            if let start = memory.baseAddress { unsafe explicit_bzero(start, memory.count) }
        }
    }
}
