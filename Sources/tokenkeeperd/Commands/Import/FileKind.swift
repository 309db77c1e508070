/// What a file is that is no text in UTF-8, by how it begins. Pure.
enum FileKind {
    private static let known: [(beginning: [UInt8], fault: String)] = [
        ([0x1F, 0x8B], "the file is compressed: decompress it with gunzip"),
        ([0x28, 0xB5, 0x2F, 0xFD], "the file is compressed: decompress it with unzstd"),
        (Array("BZh".utf8), "the file is compressed: decompress it with bunzip2"),
        ([0xFD, 0x37, 0x7A, 0x58, 0x5A], "the file is compressed: decompress it with unxz"),
        ([0x50, 0x4B, 0x03, 0x04], "the file is a zip archive or a spreadsheet: unpack it, or save it as CSV"),
        (Array("PAR1".utf8), "the file is in Parquet: convert it to CSV"),
        ([0xFF, 0xFE, 0, 0], utf32), ([0, 0, 0xFE, 0xFF], utf32), ([0xFF, 0xFE], utf16), ([0xFE, 0xFF], utf16),
    ]

    private static let utf16 = "the file is in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    private static let utf32 = "the file is in UTF-32: convert it with iconv -f UTF-32 -t UTF-8"

    /// - Parameter beginning: Six bytes at least, or the whole file.
    /// - Returns: What it is, and what to do; nil if it may be a text.
    static func fault(of beginning: ArraySlice<UInt8>) -> String? {
        if let kind = known.first(where: { beginning.starts(with: $0.beginning) }) { return kind.fault }
        // Without a byte order mark: characters of ASCII, with zeros around.
        let zeros = beginning.prefix(4).map { $0 == 0 }
        if zeros == [false, true, true, true] || zeros == [true, true, true, false] { return utf32 }
        return zeros.count == 4 && zeros[0] != zeros[1] && zeros[2] != zeros[3] ? utf16 : nil
    }
}
