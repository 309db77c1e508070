internal import TokenModel

/// Rows in the text format of COPY (https://www.postgresql.org/docs/current/sql-copy.html).
struct CopyText {
    private(set) var bytes: [UInt8] = []
    private var isFirst = true

    mutating func clear() {
        bytes.removeAll(keepingCapacity: true)
        isFirst = true
    }

    /// Removes what was written after there were this many bytes: a row that is not wanted after all.
    mutating func cut(to count: Int) {
        bytes.removeLast(bytes.count - count)
        isFirst = true
    }

    /// Takes out the last row, which is not ended, with the tab that follows its last value.
    mutating func takeRow() -> [UInt8] {
        let start = bytes.lastIndex(of: .newline).map { $0 + 1 } ?? 0
        let row = Array(bytes[start...]) + [UInt8(ascii: "\t")]
        cut(to: start)
        return row
    }

    /// Adds the beginning of a row that was taken out. The next value ends it.
    mutating func raw(_ row: [UInt8]) {
        bytes.append(contentsOf: row)
        isFirst = true
    }

    /// Whether what was written after there were this many bytes is ASCII.
    func isASCII(from count: Int) -> Bool { bytes[count...].allSatisfy { $0 < 0x80 } }

    private mutating func separate() {
        if !isFirst { bytes.append(UInt8(ascii: "\t")) }
        isFirst = false
    }

    mutating func endRow() {
        bytes.append(.newline)
        isFirst = true
    }

    mutating func null() {
        separate()
        bytes.append(.backslash)
        bytes.append(UInt8(ascii: "N"))
    }

    /// A value without special characters.
    mutating func plain(_ value: some Sequence<UInt8>) {
        separate()
        bytes.append(contentsOf: value)
    }

    mutating func text(_ source: [UInt8], _ range: Range<Int>) {
        separate()
        for place in range { escaped(source[place]) }
    }

    private mutating func escaped(_ byte: UInt8) {
        switch byte {
        case .backslash:
            bytes.append(.backslash)
            bytes.append(.backslash)
        case .newline:
            bytes.append(.backslash)
            bytes.append(UInt8(ascii: "n"))
        case .carriageReturn:
            bytes.append(.backslash)
            bytes.append(UInt8(ascii: "r"))
        case UInt8(ascii: "\t"):
            bytes.append(.backslash)
            bytes.append(UInt8(ascii: "t"))
        default: bytes.append(byte)
        }
    }

    /// A `text[]`: each element in quotes, in which a quote and a backslash are escaped. COPY then escapes the backslashes again.
    mutating func array(_ source: [UInt8], _ elements: [Range<Int>]) {
        separate()
        bytes.append(UInt8(ascii: "{"))
        for (index, element) in elements.enumerated() {
            if index > 0 { bytes.append(UInt8(ascii: ",")) }
            bytes.append(.quote)
            for place in element {
                if source[place] == .quote || source[place] == .backslash { escaped(.backslash) }
                escaped(source[place])
            }
            bytes.append(.quote)
        }
        bytes.append(UInt8(ascii: "}"))
    }

    /// An instant as PostgreSQL and `--as-of` read it.
    static func text(_ instant: Instant) -> String {
        var text = CopyText()
        text.instant(instant)
        return String(decoding: text.bytes, as: UTF8.self)
    }

    /// A `timestamptz`, in UTC. The instant is finite.
    mutating func instant(_ instant: Instant) {
        separate()
        let (seconds, millionths) = instant.microseconds.flooredDivision(by: 1_000_000)
        let (days, second) = seconds.flooredDivision(by: 86_400)
        // https://howardhinnant.github.io/date_algorithms.html#civil_from_days
        let shifted = days + 719_468
        let era = (shifted >= 0 ? shifted : shifted - 146_096) / 146_097
        let dayOfEra = shifted - era * 146_097
        let yearOfEra = (dayOfEra - dayOfEra / 1460 + dayOfEra / 36_524 - dayOfEra / 146_096) / 365
        let dayOfYear = dayOfEra - (365 * yearOfEra + yearOfEra / 4 - yearOfEra / 100)
        let shiftedMonth = (5 * dayOfYear + 2) / 153
        let month = shiftedMonth < 10 ? shiftedMonth + 3 : shiftedMonth - 9
        digits(yearOfEra + era * 400 + (month <= 2 ? 1 : 0), 4)
        bytes.append(UInt8(ascii: "-"))
        digits(month, 2)
        bytes.append(UInt8(ascii: "-"))
        digits(dayOfYear - (153 * shiftedMonth + 2) / 5 + 1, 2)
        bytes.append(UInt8(ascii: " "))
        digits(second / 3600, 2)
        bytes.append(UInt8(ascii: ":"))
        digits(second / 60 % 60, 2)
        bytes.append(UInt8(ascii: ":"))
        digits(second % 60, 2)
        if millionths > 0 {
            bytes.append(UInt8(ascii: "."))
            digits(millionths, 6)
        }
        bytes.append(contentsOf: [UInt8(ascii: "+"), UInt8(ascii: "0"), UInt8(ascii: "0")])
    }

    private mutating func digits(_ value: Int64, _ count: Int) {
        var divisor: Int64 = 1
        for _ in 1..<count { divisor *= 10 }
        while divisor > 0 {
            bytes.append(UInt8(ascii: "0") + UInt8(value / divisor % 10))
            divisor /= 10
        }
    }
}

extension Int64 {
    /// The quotient rounded down, and what is left.
    fileprivate func flooredDivision(by divisor: Int64) -> (quotient: Int64, remainder: Int64) {
        let remainder = (self % divisor + divisor) % divisor
        return ((self - remainder) / divisor, remainder)
    }
}
