import COpenSSL

/// A client's certificate.
enum PeerCertificate: Sendable {
    /// There is none: the client authenticates with JWTs.
    case none
    /// Issued by our authority and valid now. With its topics: the UID, as in Apple's certificates; empty without one.
    case trusted(topics: Set<String>)
    /// Issued by another authority, or expired.
    case untrusted

    /// - Parameters:
    ///   - certificate: An `X509`.
    ///   - authority: The CA, PEM.
    init(_ certificate: OpaquePointer, authority: String) {
        guard let issuer = PEM.read(authority, { PEM_read_bio_X509($0, nil, nil, nil) }) else {
            self = .untrusted
            return
        }
        defer { X509_free(issuer) }
        self = Self.isOf(issuer, certificate) ? .trusted(topics: Self.topics(certificate)) : .untrusted
    }

    private static func isOf(_ issuer: OpaquePointer, _ certificate: OpaquePointer) -> Bool {
        let store = X509_STORE_new()
        defer { X509_STORE_free(store) }
        let context = X509_STORE_CTX_new()
        defer { X509_STORE_CTX_free(context) }
        defer { ERR_clear_error() }
        return X509_STORE_add_cert(store, issuer) == 1 && X509_STORE_CTX_init(context, store, certificate, nil) == 1
            && X509_verify_cert(context) == 1
    }

    /// UID, 0.9.2342.19200300.100.1.1.
    private static func topics(_ certificate: OpaquePointer) -> Set<String> {
        var text = [UInt8](repeating: 0, count: 512)
        let length = text.withUnsafeMutableBytes { bytes in
            X509_NAME_get_text_by_NID(
                X509_get_subject_name(certificate), NID_userId, bytes.baseAddress?.assumingMemoryBound(to: CChar.self),
                Int32(bytes.count))
        }
        return length > 0 ? [String(decoding: text[..<Int(length)], as: UTF8.self)] : []
    }

    var topics: Set<String> {
        if case .trusted(let topics) = self { topics } else { [] }
    }
}
