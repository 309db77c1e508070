/// Reads Apple's extensions to the certificates of APNs.
///
/// Source: Apple, "Communicating with APNs" (archived; it shows the list of topics) and "Sending notification requests to APNs", which
/// names both extensions of topics.
enum PushExtension {
    /// All topics of a certificate of the kind "Apple Push Services".
    static let topics = "1.2.840.113635.100.6.3.6"
    /// All topics of a certificate of the kind "VoIP Services".
    static let voipTopics = "1.2.840.113635.100.6.3.4"
    /// Empty; present if the certificate is for the sandbox.
    static let development = "1.2.840.113635.100.6.3.1"
    /// Empty; present if the certificate is for production.
    static let production = "1.2.840.113635.100.6.3.2"

    /// The topics in a list: a SEQUENCE in which each topic, a UTF8String, is followed by a SEQUENCE of its kinds (`app`,
    /// `voip`, `complication`). Empty for anything else.
    static func topics(in der: [UInt8]) -> [String] {
        guard let outer = elements(of: der[...])?.first, outer.tag == 0x30, let list = elements(of: outer.content)
        else {
            return []
        }
        return list.filter { $0.tag == 0x0c }.map { String(decoding: $0.content, as: UTF8.self) }.filter { !$0.isEmpty }
    }

    private struct Element {
        var tag: UInt8
        var content: ArraySlice<UInt8>
    }

    /// Splits the bytes into DER elements; nil if they are not DER.
    private static func elements(of bytes: ArraySlice<UInt8>) -> [Element]? {
        var rest = bytes
        var elements: [Element] = []
        while let tag = rest.popFirst() {
            guard let first = rest.popFirst() else { return nil }
            var length = Int(first)
            if first >= 0x80 {
                // The long form. Two bytes suffice for any list of topics.
                let figures = Int(first & 0x7f)
                guard 1...2 ~= figures, rest.count >= figures else { return nil }
                length = rest.prefix(figures).reduce(0) { $0 << 8 | Int($1) }
                rest = rest.dropFirst(figures)
            }
            guard length <= rest.count else { return nil }
            elements.append(Element(tag: tag, content: rest.prefix(length)))
            rest = rest.dropFirst(length)
        }
        return elements
    }
}
