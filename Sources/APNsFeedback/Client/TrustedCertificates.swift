internal import CCurl
internal import TokenModel

/// The certificates of the authorities that a client trusts.
public enum TrustedCertificates {
    /// The file that libcurl was built to trust; nil if it has none.
    public static var systemFile: String? {
        unsafe ck_trusted_file().map { unsafe String(cString: $0) }
    }

    /// Why no server can be verified with them; nil if the file has a certificate. libcurl reads the file for each connection, and without
    /// it makes none.
    public static func fault(of options: PushClientOptions) -> String? {
        guard let file = options.authorityFile ?? systemFile else { return nil }
        let bytes: SecretBytes
        do {
            bytes = try SecretBytes(contentsOf: file, limit: 16 << 20)
        } catch {
            return "the certificates to trust, \(file), cannot be read: \(error)"
        }
        let text = unsafe bytes.withBytes { unsafe String(decoding: $0, as: UTF8.self) }
        return text.contains("-----BEGIN CERTIFICATE-----") || text.contains("-----BEGIN TRUSTED CERTIFICATE-----")
            ? nil : "the certificates to trust, \(file), contain no certificate in PEM"
    }
}
