/// How people write one token. Whatever reads tokens reads these.
public enum TokenSpellings {
    /// As the ledger writes it.
    public static let token = "abcdef01"

    public static let all = [
        "abcdef01", "ABCDEF01", "AbcdEf01", " abcdef01", "abcd ef01\r\n", "<abcdef01>", "<abcd ef01>", "< abcdef 01 >",
        "0xabcdef01",
        "0XABCD EF01", "\\xabcdef01", "AB-CD-EF-01", "ab:cd:ef:01", "\u{FEFF}abcdef01", "abcdef01\u{A0}",
        "ab\u{A0}cdef01",
        "\tab cd ef 01", "<0xAB-CD-EF-01>",
    ]
}
