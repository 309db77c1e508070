internal import COpenSSL
import FoundationEssentials
internal import TokenModel

/// One block of a text, from `-----BEGIN …-----` to `-----END …-----`.
///
/// Text between blocks is skipped: `openssl pkcs12` writes "Bag Attributes" there. The format: RFC 7468, and RFC 1421 for the
/// headers of encrypted keys.
struct PEMBlock {
    /// The type of the content, such as `PRIVATE KEY`.
    var label: String
    /// The block, including its first and last line. All lines end in a line feed, whatever ended them before.
    var text: SecretBytes

    /// The blocks of a text, in order. Skips a block without an end, or with another label at its end.
    static func all(in text: SecretBytes) -> [PEMBlock] {
        unsafe text.withBytes { bytes in
            var blocks: [PEMBlock] = []
            var label: String?
            var lines: [Slice<UnsafeRawBufferPointer>] = unsafe []
            let all = unsafe bytes.split { $0 == 0x0A || $0 == 0x0D }
            for number in unsafe all.indices {
                let line = unsafe trimmed(all[number])
                if let begun = unsafe name(in: line, after: "-----BEGIN ") {
                    label = begun
                    unsafe lines = []
                } else if let ended = unsafe name(in: line, after: "-----END ") {
                    if let label, label == ended { unsafe blocks.append(PEMBlock(label: label, lines: lines)) }
                    label = nil
                } else {
                    unsafe lines.append(line)
                }
            }
            return blocks
        }
    }

    private init(label: String, lines: [Slice<UnsafeRawBufferPointer>]) {
        self.label = label
        // An empty line ends the headers; splitting has dropped it.
        let headers = unsafe lines.prefix { unsafe $0.contains(UInt8(ascii: ":")) }.count
        let (first, last) = (Array("-----BEGIN \(label)-----\n".utf8), Array("-----END \(label)-----\n".utf8))
        let count = unsafe lines.reduce(first.count + last.count + (headers > 0 ? 1 : 0)) { unsafe $0 + $1.count + 1 }
        text = unsafe SecretBytes(count: count) { memory in
            var end = 0
            func append(_ bytes: some Collection<UInt8>) {
                unsafe UnsafeMutableRawBufferPointer(rebasing: memory[end...]).copyBytes(from: bytes)
                end += bytes.count
            }
            append(first)
            for number in unsafe lines.indices {
                if headers > 0 && number == headers { append([0x0A]) }
                unsafe append(lines[number])
                append([0x0A])
            }
            if unsafe headers > 0 && headers == lines.count { append([0x0A]) }
            append(last)
        }
    }

    /// A block with this content.
    static func text(label: String, content: SecretBytes) -> SecretBytes {
        let (first, last) = (Array("-----BEGIN \(label)-----\n".utf8), Array("-----END \(label)-----\n".utf8))
        // 48 bytes make a line of 64 characters.
        let lines = (content.count + 47) / 48
        let count = first.count + (content.count + 2) / 3 * 4 + lines + last.count
        return unsafe SecretBytes(count: count) { memory in
            unsafe memory.copyBytes(from: first)
            var end = first.count
            unsafe content.withBytes { bytes in
                for start in stride(from: 0, to: bytes.count, by: 48) {
                    let line = unsafe UnsafeRawBufferPointer(rebasing: bytes[start..<min(start + 48, bytes.count)])
                    // EVP_EncodeBlock writes a NUL at the end; the line feed replaces it.
                    let written = unsafe EVP_EncodeBlock(
                        (memory.baseAddress! + end).assumingMemoryBound(to: UInt8.self),
                        line.baseAddress!.assumingMemoryBound(to: UInt8.self), CInt(line.count))
                    end += Int(written)
                    unsafe memory[end] = 0x0A
                    end += 1
                }
            }
            unsafe UnsafeMutableRawBufferPointer(rebasing: memory[end...]).copyBytes(from: last)
        }
    }

    /// The decoded content; nil if it is not base64, or if there are headers. It is not wiped, so use it for certificates only.
    var content: [UInt8]? {
        let lines = String(decoding: text.unprotected, as: UTF8.self).split(separator: "\n")
        return Data(base64Encoded: lines.dropFirst().dropLast().joined()).map(Array.init)
    }

    /// The line without surrounding blanks, and without the byte order mark that some editors write at the beginning of a file.
    private static func trimmed(_ line: Slice<UnsafeRawBufferPointer>) -> Slice<UnsafeRawBufferPointer> {
        func isBlank(_ byte: UInt8) -> Bool { byte == 0x20 || (0x09...0x0D).contains(byte) }
        var line = unsafe line
        if unsafe line.starts(with: [0xEF, 0xBB, 0xBF]) { unsafe line = line.dropFirst(3) }
        unsafe line = line.drop(while: isBlank)
        while let last = unsafe line.last, isBlank(last) { unsafe line = line.dropLast() }
        return unsafe line
    }

    private static func name(in line: Slice<UnsafeRawBufferPointer>, after beginning: String) -> String? {
        guard unsafe line.starts(with: beginning.utf8), unsafe line.count > beginning.utf8.count + 5,
            unsafe line.suffix(5).elementsEqual("-----".utf8)
        else { return nil }
        return unsafe String(decoding: line.dropFirst(beginning.utf8.count).dropLast(5), as: UTF8.self)
    }
}

extension PEMBlock {
    /// A private key of any kind, encrypted or not.
    var isPrivateKey: Bool { label == "PRIVATE KEY" || label.hasSuffix(" PRIVATE KEY") }

    /// `X509 CERTIFICATE` is an old label. OpenSSL's own `TRUSTED CERTIFICATE` is something else.
    var isCertificate: Bool { label == "CERTIFICATE" || label == "X509 CERTIFICATE" }
}
