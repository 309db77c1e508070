import Foundation

/// The files that a server and its clients need: a CA, a server certificate for localhost, and a signing key like those that Apple
/// issues. The `openssl` command line tool makes them. A server refuses the files of a second authority.
public final class TestAuthority: Sendable {
    /// Paths of two PEM files.
    public struct Identity: Sendable {
        public let certificate: String
        /// PKCS#8, not encrypted.
        public let key: String
    }

    /// The folder of all files.
    public let folder: String
    /// Path of the CA's certificate, PEM. Clients must trust it.
    public let certificate: String
    /// The server's certificate, for localhost, 127.0.0.1 and ::1.
    public let server: Identity
    /// The public half of the `.p8` key.
    public let signingKey: FakeSigningKey
    /// Path of the `.p8` key: PKCS#8, PEM, P-256.
    public let signingKeyFile: String

    private let isTemporary: Bool

    /// Makes the files in a temporary folder, which is removed with this object.
    public convenience init() throws {
        try self.init(in: NSTemporaryDirectory() + "fake-apns-\(UUID().uuidString)", isTemporary: true)
    }

    /// Makes the files in a folder that is kept. Files that exist are used.
    public convenience init(keptIn folder: String) throws {
        try self.init(in: folder, isTemporary: false)
    }

    private init(in folder: String, isTemporary: Bool) throws {
        self.folder = folder
        self.isTemporary = isTemporary
        certificate = folder + "/ca.pem"
        server = Identity(certificate: folder + "/server.pem", key: folder + "/server.key")
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        if !FileManager.default.fileExists(atPath: server.certificate) {
            try Self.openssl(
                folder,
                ["req", "-x509"] + Self.newKey("ca.key") + [
                    "-out", "ca.pem", "-days", "3650", "-subj", "/CN=fake APNs CA",
                ])
            try Self.issue(
                folder, "server", subject: "/CN=localhost", days: 800,
                extensions: "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1\nextendedKeyUsage=serverAuth\n")
        }
        (signingKey, signingKeyFile) = try Self.makeKey(folder, id: "FAKE123456", team: "TEAM123456")
    }

    deinit {
        if isTemporary { try? FileManager.default.removeItem(atPath: folder) }
    }

    // Provider tokens -----------------------------------------------------------------------------------------------

    /// Makes another `.p8` key, in `AuthKey_<id>.p8` of the folder.
    public func makeKey(id: String, team: String) throws -> (key: FakeSigningKey, file: String) {
        try Self.makeKey(folder, id: id, team: team)
    }

    /// Makes a JWT as Apple requires it.
    ///
    /// - Parameters:
    ///   - issuedAt: Seconds since the Unix epoch; nil for now.
    ///   - key: Nil for the authority's first key.
    public func providerToken(issuedAt: Int64? = nil, key: (key: FakeSigningKey, file: String)? = nil) throws -> String
    {
        let key = key ?? (signingKey, signingKeyFile)
        return try providerToken(
            header: "{\"alg\":\"ES256\",\"kid\":\"\(key.key.id)\"}",
            claims: "{\"iss\":\"\(key.key.team)\",\"iat\":\(issuedAt ?? FakeOptions.systemClock() / 1000)}",
            keyFile: key.file)
    }

    /// Makes a JWT with any header and claims, valid or not, signed with the first key unless another one is given.
    public func providerToken(header: String, claims: String, keyFile: String? = nil) throws -> String {
        let text = Base64URL.encode(Array(header.utf8)) + "." + Base64URL.encode(Array(claims.utf8))
        let key = try String(contentsOfFile: keyFile ?? signingKeyFile, encoding: .utf8)
        guard let signature = ES256.sign(Array(text.utf8), privateKey: key) else {
            throw TestAuthorityFailure(description: "\(keyFile ?? signingKeyFile) cannot sign")
        }
        return text + "." + Base64URL.encode(signature)
    }

    // Client certificates -------------------------------------------------------------------------------------------

    /// Makes a client's certificate and key, in `<name>.pem` and `<name>.key`.
    ///
    /// - Parameters:
    ///   - topic: The UID in the subject, as in Apple's certificates; nil for none.
    ///   - days: The days until it expires. Negative if it has expired.
    public func clientCertificate(_ name: String, topic: String? = nil, days: Int = 30) throws -> Identity {
        let uid = topic.map { "/UID=\($0)" } ?? ""
        return try Self.issue(
            folder, name, subject: "\(uid)/CN=Apple Push Services: \(name)", days: days,
            extensions: "extendedKeyUsage=clientAuth\n")
    }

    /// Puts both into one PKCS#12 file next to the certificate, and returns its path.
    ///
    /// - Parameter legacy: Whether it is encrypted with RC2-40 and 3DES, as old exports are. OpenSSL 3 needs its legacy provider for it.
    public func pkcs12(of identity: Identity, password: String, legacy: Bool = false) throws -> String {
        let path = (identity.certificate as NSString).deletingPathExtension + (legacy ? "-legacy.p12" : ".p12")
        try Self.openssl(
            folder,
            [
                "pkcs12", "-export", "-in", identity.certificate, "-inkey", identity.key, "-out", path, "-passout",
                "pass:\(password)",
            ]
                + (legacy ? ["-legacy", "-certpbe", "PBE-SHA1-RC2-40", "-keypbe", "PBE-SHA1-3DES"] : []))
        return path
    }

    // openssl -------------------------------------------------------------------------------------------------------

    private static func newKey(_ name: String) -> [String] {
        ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", name]
    }

    private static func makeKey(_ folder: String, id: String, team: String) throws -> (FakeSigningKey, String) {
        let file = folder + "/AuthKey_\(id).p8"
        let publicFile = folder + "/AuthKey_\(id).pub"
        if !FileManager.default.fileExists(atPath: publicFile) {
            try openssl(folder, ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", file])
            try openssl(folder, ["pkey", "-in", file, "-pubout", "-out", publicFile])
        }
        let publicKey = try String(contentsOfFile: publicFile, encoding: .utf8)
        return (FakeSigningKey(id: id, team: team, publicKey: publicKey), file)
    }

    @discardableResult
    private static func issue(_ folder: String, _ name: String, subject: String, days: Int, extensions: String) throws
        -> Identity
    {
        try openssl(folder, ["req", "-subj", subject, "-out", "\(name).csr"] + newKey("\(name).key"))
        try extensions.write(toFile: "\(folder)/\(name).ext", atomically: true, encoding: .utf8)
        try openssl(
            folder,
            [
                "x509", "-req", "-in", "\(name).csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "\(days)",
                "-extfile", "\(name).ext", "-out", "\(name).pem",
            ])
        return Identity(certificate: "\(folder)/\(name).pem", key: "\(folder)/\(name).key")
    }

    private static func openssl(_ folder: String, _ arguments: [String]) throws {
        let process = Process()
        process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        process.arguments = ["openssl"] + arguments
        process.currentDirectoryURL = URL(fileURLWithPath: folder)
        process.standardInput = FileHandle.nullDevice
        let errors = Pipe()
        process.standardOutput = FileHandle.nullDevice
        process.standardError = errors
        try process.run()
        let said = errors.fileHandleForReading.readDataToEndOfFile()
        process.waitUntilExit()
        guard process.terminationStatus == 0 else {
            throw TestAuthorityFailure(description: "openssl \(arguments[0]): \(String(decoding: said, as: UTF8.self))")
        }
    }
}

/// The output of a failed `openssl`.
public struct TestAuthorityFailure: Error, CustomStringConvertible {
    public let description: String
}
