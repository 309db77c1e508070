internal import TokenModel

/// Why an object of JSON has no value of a key: slow, and only for objects that were read without a fault.
extension JSONReader {
    /// - Parameters:
    ///   - column: A key or a path, as in `push.token`.
    ///   - ignoresCase: Whether the key may be in upper case.
    /// - Returns: Nil if the key is there: its value is empty or null.
    mutating func absence(of column: String, ignoresCase: Bool) -> String? {
        let start = place
        var ignored: String?
        if enter(column, ignoresCase: ignoresCase, list: &ignored) { return nil }
        place = start
        var names = column.split(separator: ".", omittingEmptySubsequences: false).map(String.init)[...]
        var (walked, list) = ([String](), String?.none)
        while let name = names.popFirst() {
            guard enter(name, ignoresCase: false, list: &list) else { break }
            if names.isEmpty { return nil }
            walked.append(name)
            if isAt("[") {
                return "no key \(column) (\(walked.joined(separator: ".")) is an array: make lines of it with jq)"
            }
        }
        guard walked.isEmpty, let list else { return "no key \(column)" }
        let command = list.utf8.allSatisfy(Self.isPlain) ? "jq -c '.\(list)[]'" : "jq"
        let shown = DeviceToken.cut(in: HistoryText.plain(String(list.prefix(60))))
        return "no key \(column) (\(shown) is an array: make lines of it with \(command))"
    }

    private static func isPlain(_ byte: UInt8) -> Bool {
        (UInt8(ascii: "a")...UInt8(ascii: "z")).contains(byte) || (UInt8(ascii: "A")...UInt8(ascii: "Z")).contains(byte)
            || byte == UInt8(ascii: "_")
    }

    /// Goes from the beginning of an object to the value of a key.
    ///
    /// - Parameter list: Gets the first other key whose value is an array of objects.
    /// - Returns: False if there is no object, or no such key in it.
    private mutating func enter(_ name: String, ignoresCase: Bool, list: inout String?) -> Bool {
        do {
            try take("{")
            skipBlanks()
            while !isAt("}") {
                if isAt(",") { place += 1 }
                skipBlanks()
                var key = ImportRow()
                try string(into: &key)
                skipBlanks()
                try take(":")
                skipBlanks()
                let word = key.word(0..<key.bytes.count)
                if word == name || ignoresCase && word.lowercased() == name { return true }
                let value = bytes[place...].prefix(64).filter { !$0.isBlank }
                if list == nil, value.starts(with: Array("[{".utf8)) { list = word }
                try skipValue()
                skipBlanks()
            }
        } catch {}
        return false
    }
}
