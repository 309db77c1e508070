internal import TokenModel

/// Reads an instant as files write it. Pure.
struct TimeText: Equatable {
    /// How an instant is written.
    enum Form: String, CaseIterable {
        /// ISO 8601, or a number: up to 11 digits are seconds, 12 to 14 milliseconds, 15 to 17 microseconds. In each unit, these digits
        /// reach to the year 5138; APNs began in 2009, and seconds have had 10 digits and milliseconds 13 since.
        case auto
        /// ISO 8601 and RFC 3339 only.
        case iso
        case seconds, milliseconds, microseconds
    }

    var form = Form.auto
    /// The zone of texts that name none.
    var zone = LocalTime.utc

    /// - Returns: Nil if it is no instant of the years 1 to 9999.
    func instant(_ bytes: [UInt8], _ range: Range<Int>) -> Instant? {
        var reader = Reader(bytes: bytes, place: range.lowerBound, end: range.upperBound)
        reader.skipBlanks()
        if form != .iso, let number = reader.number() { return Self.instant(number, form) }
        if form != .iso, form != .auto { return nil }
        return reader.iso(in: zone)
    }

    private static func instant(_ number: Number, _ form: Form) -> Instant? {
        guard number.digits <= 17 else { return nil }
        let unit: Int64
        switch form {
        case .seconds: unit = 1_000_000
        case .milliseconds: unit = 1000
        case .microseconds: unit = 1
        case .auto, .iso: unit = number.digits <= 11 ? 1_000_000 : number.digits <= 14 ? 1000 : 1
        }
        let (whole, overflow) = number.whole.multipliedReportingOverflow(by: unit)
        let microseconds = whole + number.millionths * unit / 1_000_000
        // The year 10000.
        return overflow || microseconds >= 253_402_300_800_000_000 ? nil : Instant(microseconds: microseconds)
    }

    private struct Number {
        var whole: Int64
        var digits: Int
        var millionths: Int64
    }

    /// Days since 1970-01-01 in the proleptic Gregorian calendar
    /// (https://howardhinnant.github.io/date_algorithms.html#days_from_civil).
    static func days(year: Int64, month: Int64, day: Int64) -> Int64 {
        let y = month <= 2 ? year - 1 : year
        let era = (y >= 0 ? y : y - 399) / 400
        let yearOfEra = y - era * 400
        let dayOfYear = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1
        return era * 146_097 + yearOfEra * 365 + yearOfEra / 4 - yearOfEra / 100 + dayOfYear - 719_468
    }

    private struct Reader {
        let bytes: [UInt8]
        var place: Int
        let end: Int

        mutating func skipBlanks() {
            while place < end, bytes[place].isBlank { place += 1 }
        }

        /// The whole text as a decimal number without a sign; nil, and nothing read, if it is anything else.
        mutating func number() -> Number? {
            let start = place
            var number = Number(whole: 0, digits: 0, millionths: 0)
            while let digit = digit(), number.digits < 18 {
                number.whole = number.whole * 10 + digit
                number.digits += 1
            }
            if number.digits > 0, has(".") {
                var unit: Int64 = 100_000
                while let digit = digit() {
                    number.millionths += digit * unit
                    unit /= 10
                }
            }
            skipBlanks()
            if place == end, number.digits > 0 { return number }
            place = start
            return nil
        }

        private mutating func digit() -> Int64? {
            guard place < end, bytes[place] >= 0x30, bytes[place] <= 0x39 else { return nil }
            defer { place += 1 }
            return Int64(bytes[place] - 0x30)
        }

        private mutating func has(_ character: Character) -> Bool {
            guard place < end, bytes[place] == character.asciiValue else { return false }
            place += 1
            return true
        }

        /// A number of exactly this many digits.
        private mutating func digits(_ count: Int) -> Int64? {
            var value: Int64 = 0
            for _ in 0..<count {
                guard let digit = digit() else { return nil }
                value = value * 10 + digit
            }
            return value
        }

        mutating func iso(in local: LocalTime) -> Instant? {
            guard let year = digits(4), has("-"), let month = digits(2), has("-"), let day = digits(2),
                year >= 1, (1...12).contains(month), day >= 1, day <= Self.length(ofMonth: month, year)
            else { return nil }
            var seconds: Int64 = 0
            var millionths: Int64 = 0
            if has("T") || has("t") || has(" ") {
                guard let hour = digits(2), has(":"), let minute = digits(2), hour < 24, minute < 60 else { return nil }
                seconds = hour * 3600 + minute * 60
                if has(":") {
                    // 60 is a leap second.
                    guard let second = digits(2), second <= 60 else { return nil }
                    seconds += second
                    if has(".") || has(",") {
                        var unit: Int64 = 100_000
                        var count = 0
                        while let digit = digit() {
                            millionths += digit * unit
                            unit /= 10
                            count += 1
                        }
                        if count == 0 { return nil }
                    }
                }
            }
            seconds += TimeText.days(year: year, month: month, day: day) * 86_400
            skipBlanks()
            if place == end { return Instant(microseconds: local.utc(seconds) * 1_000_000 + millionths) }
            guard let zone = zone() else { return nil }
            skipBlanks()
            guard place == end else { return nil }
            return Instant(microseconds: (seconds - zone) * 1_000_000 + millionths)
        }

        /// What is to be subtracted, in seconds.
        private mutating func zone() -> Int64? {
            if has("Z") || has("z") { return 0 }
            if has("U") { return has("T") && has("C") ? 0 : nil }
            if has("G") { return has("M") && has("T") ? 0 : nil }
            let isNegative = has("-")
            guard isNegative || has("+"), let hours = digits(2), hours <= 15 else { return nil }
            var minutes: Int64 = 0
            if has(":") || place < end, place < end {
                guard let value = digits(2), value < 60 else { return nil }
                minutes = value
            }
            return (isNegative ? -1 : 1) * (hours * 3600 + minutes * 60)
        }

        private static func length(ofMonth month: Int64, _ year: Int64) -> Int64 {
            switch month {
            case 2: year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) ? 29 : 28
            case 4, 6, 9, 11: 30
            default: 31
            }
        }
    }
}

extension TimeText {
    /// `+09:00`, in seconds.
    static func offset(_ text: String) -> Int64? {
        let bytes = Array("2000-01-01T00:00:00\(text)".utf8)
        guard text.hasPrefix("+") || text.hasPrefix("-"),
            let instant = TimeText(form: .iso).instant(bytes, 0..<bytes.count)
        else { return nil }
        return (946_684_800_000_000 - instant.microseconds) / 1_000_000
    }

    static func instant(_ text: String, in zone: LocalTime = .utc) -> Instant? {
        let bytes = Array(text.utf8)
        return TimeText(zone: zone).instant(bytes, 0..<bytes.count)
    }
}
