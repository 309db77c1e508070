/// One request of a campaign: which campaign, and the number of the request in it.
///
/// A campaign's requests have no rows of their own, so both their `apns-id` and the number by which a daemon knows them are made of
/// these two. `tokenkeeper.campaign_apns_id` makes the same `apns-id`.
public struct CampaignRequest: Hashable, Sendable {
    /// Its `campaign_id`: 1 to 2^30 - 1.
    public var campaign: Int64
    /// From 1, up to 2^32 - 1; not every number is used.
    public var ordinal: Int64

    /// The largest `campaign_id`.
    public static let lastCampaign: Int64 = (1 << 30) - 1

    public init(campaign: Int64, ordinal: Int64) {
        self.campaign = campaign
        self.ordinal = ordinal
    }

    /// - Parameter number: Negative, so that it is no `request_id`.
    /// - Returns: Nil for any other number than `number` returns.
    public init?(number: Int64) {
        if number >= 0 || number == .min { return nil }
        self.init(campaign: -number >> 32, ordinal: -number & 0xffff_ffff)
        if ordinal == 0 || !(1...Self.lastCampaign).contains(campaign) { return nil }
    }

    /// The number by which a daemon knows the request.
    public var number: Int64 { -(campaign << 32 | ordinal) }

    /// A UUID of version 8 in lower case: 48 bits for the campaign and 48 for the request.
    public var apnsID: String {
        var text = Self.empty
        Self.write(UInt64(campaign), in: &text, from: 12)
        Self.write(UInt64(ordinal), in: &text, from: 35)
        return String(decoding: text, as: UTF8.self)
    }

    private static let empty = Array("00000000-0000-8000-8000-000000000000".utf8)

    /// Writes hex digits from right to left.
    private static func write(_ value: UInt64, in text: inout [UInt8], from last: Int) {
        var (value, place) = (value, last)
        while value > 0 {
            // A hyphen stays.
            if place == 8 { place -= 1 }
            let digit = UInt8(value & 15)
            text[place] = digit < 10 ? UInt8(ascii: "0") + digit : UInt8(ascii: "a") + digit - 10
            value >>= 4
            place -= 1
        }
    }
}
