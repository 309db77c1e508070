import TokenModel

/// A request without a fault.
func request(
    _ number: Int = 1, environment: Environment = .production, token: String = "AB01",
    topic: String = "com.example.app",
    collapseID: String? = nil, slot: Int = 0
) -> PushRequest {
    let digits = String(number, radix: 16)
    return PushRequest(
        address: TokenAddress(
            environment: environment, topic: Topic(topic)!, token: DeviceToken(hex: token)!),
        payload: Array("{}".utf8), pushType: .alert, collapseID: collapseID,
        id: "00000000-0000-4000-8000-" + String(repeating: "0", count: 12 - digits.count) + digits,
        slot: slot)
}
