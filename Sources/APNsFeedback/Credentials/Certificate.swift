internal import COpenSSL
internal import TokenModel

/// An X.509 certificate. Owns the `X509`; only `PrivateKey` sees the pointer.
@safe final class Certificate {
    private let certificate: OpaquePointer

    /// Takes ownership of a certificate.
    init(owning certificate: OpaquePointer) {
        unsafe self.certificate = certificate
    }

    deinit {
        unsafe X509_free(certificate)
    }

    /// Nil unless the bytes are one certificate and nothing else.
    convenience init?(der bytes: [UInt8]) {
        var isWhole = false
        let read: OpaquePointer? = unsafe bytes.withUnsafeBufferPointer { buffer in
            var place = buffer.baseAddress
            defer { unsafe isWhole = place == buffer.baseAddress?.advanced(by: buffer.count) }
            return unsafe d2i_X509(nil, &place, buffer.count)
        }
        guard let read = unsafe read else { return nil }
        unsafe self.init(owning: read)
        if !isWhole { return nil }
    }

    /// Nil if OpenSSL cannot write it.
    var pem: [UInt8]? {
        var bytes: UnsafeMutablePointer<UInt8>?
        let length = unsafe i2d_X509(certificate, &bytes)
        guard length > 0, let bytes = unsafe bytes else { return nil }
        defer { unsafe CRYPTO_free(bytes, nil, 0) }
        let content = unsafe Array(UnsafeBufferPointer(start: bytes, count: Int(length)))
        return PEMBlock.text(label: "CERTIFICATE", content: SecretBytes(content)).unprotected
    }

    func isOf(_ key: PrivateKey) -> Bool {
        unsafe key.belongs(to: certificate)
    }

    /// Nil if the date is malformed.
    var validFrom: Instant? { unsafe Self.instant(X509_get0_notBefore(certificate)) }
    var expiresAt: Instant? { unsafe Self.instant(X509_get0_notAfter(certificate)) }

    var commonNames: [String] { subject(NID_commonName) }
    /// The attribute `UID` of the subject, 0.9.2342.19200300.100.1.1.
    var userIDs: [String] { subject(NID_userId) }

    /// The bytes of an extension; nil if the certificate does not have it.
    ///
    /// - Parameter identifier: The extension's OID, in digits and dots.
    func content(ofExtension identifier: String) -> [UInt8]? {
        guard let object = unsafe OBJ_txt2obj(identifier, 1) else { return nil }
        defer { unsafe ASN1_OBJECT_free(object) }
        let place = unsafe X509_get_ext_by_OBJ(certificate, object, -1)
        guard place >= 0, let found = unsafe X509_get_ext(certificate, place),
            let value = unsafe X509_EXTENSION_get_data(found), let start = unsafe ASN1_STRING_get0_data(value)
        else { return nil }
        return unsafe Array(UnsafeBufferPointer(start: start, count: Int(ASN1_STRING_length(value))))
    }

    /// The values of an attribute of the subject, in order, as UTF-8.
    private func subject(_ attribute: CInt) -> [String] {
        guard let name = unsafe X509_get_subject_name(certificate) else { return [] }
        var values: [String] = []
        var place: CInt = -1
        while true {
            place = unsafe X509_NAME_get_index_by_NID(name, attribute, place)
            guard place >= 0 else { return values }
            guard let entry = unsafe X509_NAME_get_entry(name, place),
                let value = unsafe X509_NAME_ENTRY_get_data(entry)
            else { continue }
            var bytes: UnsafeMutablePointer<UInt8>?
            let length = unsafe ASN1_STRING_to_UTF8(&bytes, value)
            guard length >= 0, let bytes = unsafe bytes else { continue }
            defer { unsafe CRYPTO_free(bytes, nil, 0) }
            unsafe values.append(
                String(decoding: UnsafeBufferPointer(start: bytes, count: Int(length)), as: UTF8.self))
        }
    }

    private static func instant(_ time: UnsafePointer<ASN1_TIME>?) -> Instant? {
        guard let time = unsafe time, let epoch = unsafe ASN1_TIME_set(nil, 0) else { return nil }
        defer { unsafe ASN1_STRING_free(epoch) }
        var days: CInt = 0
        var seconds: CInt = 0
        guard unsafe ASN1_TIME_diff(&days, &seconds, epoch, time) == 1 else { return nil }
        return Instant(microseconds: (Int64(days) * 86_400 + Int64(seconds)) * 1_000_000)
    }
}
