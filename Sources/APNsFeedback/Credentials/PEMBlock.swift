import FoundationEssentials

/// One `-----BEGIN …-----` to `-----END …-----` of a text.
///
/// What stands between blocks is passed over: `openssl pkcs12` writes "Bag Attributes" there. Source of the form: RFC 7468,
/// and RFC 1421 for the headers of encrypted keys.
struct PEMBlock: Equatable {
    /// Such as `PRIVATE KEY`.
    var label: String
    /// With both of its lines, and lines ended by a line feed, whatever ended them before.
    var text: [UInt8]
    /// What the base64 says; nil where it is none, and where there are headers.
    var content: [UInt8]?

    /// The blocks of a text in their order; one that is not ended, or by another label, is left out.
    static func all(in bytes: [UInt8]) -> [PEMBlock] {
        var blocks: [PEMBlock] = []
        var label: String?
        var lines: [Substring] = []
        // Neither a key nor a certificate has other than ASCII in it; names between the blocks may.
        for line in String(decoding: bytes, as: UTF8.self).split(whereSeparator: \.isNewline) {
            let line = trimmed(line)
            if let begun = name(in: line, after: "-----BEGIN ") {
                label = begun
                lines = []
            } else if let ended = name(in: line, after: "-----END ") {
                if let label, label == ended { blocks.append(PEMBlock(label: label, lines: lines)) }
                label = nil
            } else {
                lines.append(line)
            }
        }
        return blocks
    }

    /// A block with this content.
    init(label: String, content: [UInt8]) {
        let base64 = Array(Data(content).base64EncodedString().utf8)
        self.label = label
        self.content = content
        text = Array("-----BEGIN \(label)-----\n".utf8)
        for start in stride(from: 0, to: base64.count, by: 64) {
            text += base64[start..<min(start + 64, base64.count)]
            text.append(UInt8(ascii: "\n"))
        }
        text += Array("-----END \(label)-----\n".utf8)
    }

    private init(label: String, lines: [Substring]) {
        self.label = label
        content = Data(base64Encoded: lines.joined()).map(Array.init)
        // Headers are ended by an empty line, which splitting has dropped.
        let headers = lines.prefix { $0.contains(":") }
        var all = ["-----BEGIN \(label)-----"[...]] + headers
        if !headers.isEmpty { all.append("") }
        all += lines.dropFirst(headers.count) + ["-----END \(label)-----"]
        text = Array((all.joined(separator: "\n") + "\n").utf8)
    }

    /// Without blanks around it, and without the mark that some editors put at the beginning of a file.
    private static func trimmed(_ line: Substring) -> Substring {
        var line = line.drop { $0.isWhitespace || $0 == "\u{feff}" }
        while line.last?.isWhitespace == true { line.removeLast() }
        return line
    }

    private static func name(in line: Substring, after beginning: String) -> String? {
        guard line.hasPrefix(beginning), line.hasSuffix("-----"), line.count > beginning.count + 5 else { return nil }
        return String(line.dropFirst(beginning.count).dropLast(5))
    }
}

extension PEMBlock {
    /// A private key of any kind, encrypted or not.
    var isPrivateKey: Bool { label == "PRIVATE KEY" || label.hasSuffix(" PRIVATE KEY") }

    /// `X509 CERTIFICATE` is an old name of it; `TRUSTED CERTIFICATE`, OpenSSL's own, is another thing.
    var isCertificate: Bool { label == "CERTIFICATE" || label == "X509 CERTIFICATE" }
}
