internal import TokenLedger
internal import TokenModel

/// The requests that this daemon has claimed: of those for one device token one is under way at a time, in their order.
///
/// So the first answer speaks for those behind it: when it is a 410, they have not been sent.
struct RequestsInFlight {
    /// Of each token: the one under way, and those that wait behind it.
    private var lines: [TokenAddress: [ClaimedRequest]] = [:]
    /// How many there are, those that wait included.
    private(set) var count = 0

    var isEmpty: Bool { lines.isEmpty }

    /// Takes requests that were claimed.
    ///
    /// - Returns: Those to send now.
    mutating func take(_ claimed: [ClaimedRequest]) -> [PushRequest] {
        count += claimed.count
        return claimed.compactMap { claimed in
            lines[claimed.request.address, default: []].append(claimed)
            return lines[claimed.request.address]?.count == 1 ? claimed.request : nil
        }
    }

    /// The numbers of all.
    var numbers: Set<Int64> { Set(lines.values.joined().map(\.number)) }

    /// Drops what is not this daemon's any more.
    mutating func keep(only numbers: Set<Int64>) {
        for (address, line) in lines {
            // The one under way stays at its place: those behind it wait for its end.
            let kept = line.prefix(1) + line.dropFirst().filter { numbers.contains($0.number) }
            count -= line.count - kept.count
            lines[address] = Array(kept)
        }
    }

    /// The one under way for a token.
    func underWay(_ address: TokenAddress) -> ClaimedRequest? { lines[address]?.first }

    /// The one under way has ended, and the next is to be sent.
    mutating func goOn(_ address: TokenAddress) -> PushRequest? {
        guard var line = lines.removeValue(forKey: address) else { return nil }
        count -= 1
        line.removeFirst()
        if line.isEmpty { return nil }
        lines[address] = line
        return line[0].request
    }

    /// The one under way has ended, and those behind it are not to be sent.
    ///
    /// - Returns: Those behind it.
    mutating func giveBack(_ address: TokenAddress) -> [ClaimedRequest] {
        guard let line = lines.removeValue(forKey: address) else { return [] }
        count -= line.count
        return Array(line.dropFirst())
    }
}
