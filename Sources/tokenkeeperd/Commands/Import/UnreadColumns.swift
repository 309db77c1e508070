internal import TokenModel

/// The columns or keys of a file that nothing is read from. One of them may be a field under another name. Pure.
struct UnreadColumns {
    private var names: [[UInt8]] = []
    private var hasMore = false

    /// The names come from the file: there may be any number of them.
    private static let most = 30

    /// - Parameters:
    ///   - range: Where the name is in `bytes`.
    ///   - path: The keys around it, each with its dot.
    mutating func note(_ bytes: [UInt8], _ range: Range<Int>, path: [UInt8] = []) {
        let count = path.count + range.count
        let isKnown = names.contains {
            $0.count == count && $0.starts(with: path) && $0[path.count...].elementsEqual(bytes[range])
        }
        if isKnown || range.isEmpty { return }
        if names.count < Self.most { names.append(path + bytes[range]) } else { hasMore = true }
    }

    /// `not read: is_active, lastSeen`; empty if everything is read.
    var lines: [String] {
        let shown = names.map {
            DeviceToken.cut(in: HistoryText.plain(String(String(decoding: $0, as: UTF8.self).prefix(60))))
        }
        return shown.isEmpty ? [] : ["  not read: " + (shown + (hasMore ? ["…"] : [])).joined(separator: ", ")]
    }
}
