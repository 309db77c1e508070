import Testing
import TokenModel

@Suite struct `The requests of campaigns` {
    /// The same values as in the tests of `tokenkeeper.campaign_apns_id`.
    @Test(arguments: [
        (1, 1, "00000000-0001-8000-8000-000000000001"), (7, 513, "00000000-0007-8000-8000-000000000201"),
        (0x12ab_cdef, 0xfedc_ba98, "000012ab-cdef-8000-8000-0000fedcba98"),
        (CampaignRequest.lastCampaign, 0xffff_ffff, "00003fff-ffff-8000-8000-0000ffffffff"),
    ])
    func `number and apns-id contain campaign and ordinal`(campaign: Int64, ordinal: Int64, id: String) {
        let request = CampaignRequest(campaign: campaign, ordinal: ordinal)
        #expect(request.apnsID == id)
        #expect(request.number < 0 && CampaignRequest(number: request.number) == request)
    }

    @Test(arguments: [0, 1, -1, -(1 << 32), Int64.min, .max, -(1 << 62) - 1])
    func `other numbers are of no campaign`(number: Int64) {
        #expect(CampaignRequest(number: number) == nil)
    }
}
