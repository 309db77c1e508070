import APNsFeedback
import COpenSSL
import Foundation
import Testing
import TokenModel

/// A temporary folder in which the `openssl` command line tool makes keys and certificates. It is deleted with the object.
final class Workshop: Sendable {
    let folder: URL

    init() throws {
        folder = FileManager.default.temporaryDirectory.appending(path: "tokenkeeper-credentials-\(UUID().uuidString)")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
    }

    deinit {
        try? FileManager.default.removeItem(at: folder)
    }

    /// Runs a shell command in the folder, and fails with its output.
    @discardableResult
    func run(_ line: String) throws -> String {
        let process = Process()
        process.executableURL = URL(filePath: "/bin/sh")
        process.arguments = ["-ec", line]
        process.currentDirectoryURL = folder
        process.standardInput = FileHandle.nullDevice
        let said = Pipe()
        process.standardOutput = said
        process.standardError = said
        try process.run()
        let output = String(decoding: try said.fileHandleForReading.readToEnd() ?? Data(), as: UTF8.self)
        process.waitUntilExit()
        guard process.terminationStatus == 0 else { throw Failure(line: line, output: output) }
        return output
    }

    func read(_ name: String) throws -> [UInt8] {
        Array(try Data(contentsOf: folder.appending(path: name)))
    }

    func write(_ content: some Sequence<UInt8>, to name: String) throws {
        try Data(content).write(to: folder.appending(path: name))
    }

    struct Failure: Error {
        var line: String
        var output: String
    }
}

extension Workshop {
    /// A key as Apple issues it.
    func makeKey(_ name: String = "key.p8") throws -> [UInt8] {
        try run("openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out \(name)")
        return try read(name)
    }

    /// A certificate that signs itself, in `<name>.pem`, with its key in `<name>.key`.
    func makeCertificate(
        _ name: String = "push", subject: String = "/UID=com.example.app/CN=Apple Push Services: com.example.app",
        days: String = "-days 30", extensions: String = ""
    ) throws {
        try write(
            """
            [req]
            distinguished_name = dn
            x509_extensions = v3
            [dn]
            [v3]
            basicConstraints = CA:FALSE
            \(extensions)
            """.utf8, to: "\(name).conf")
        try run(
            """
            openssl req -new -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout \(name).key \
            -out \(name).pem -subj '\(subject)' \(days) -config \(name).conf
            """)
    }
}

extension Workshop {
    /// A PKCS#12 file without a password with several identities, of `<name>.pem` and `<name>.key`. The `openssl` command writes only one.
    func makeArchive(of names: [String], to file: String) throws {
        var (keys, certificates, safes): (OpaquePointer?, OpaquePointer?, OpaquePointer?)
        for name in names {
            let key = try unsafe bio("\(name).key") { unsafe PEM_read_bio_PrivateKey($0, nil, nil, nil) }
            let certificate = try unsafe bio("\(name).pem") { unsafe PEM_read_bio_X509($0, nil, nil, nil) }
            try unsafe #require(PKCS12_add_key(&keys, key, 0, 2048, NID_aes_256_cbc, "") != nil)
            try unsafe #require(PKCS12_add_cert(&certificates, certificate) != nil)
            unsafe EVP_PKEY_free(key)
            unsafe X509_free(certificate)
        }
        try unsafe #require(PKCS12_add_safe(&safes, certificates, NID_aes_256_cbc, 2048, "") == 1)
        try unsafe #require(PKCS12_add_safe(&safes, keys, -1, 0, nil) == 1)
        let archive = try unsafe #require(PKCS12_add_safes(safes, 0))
        try unsafe #require(PKCS12_set_mac(archive, "", 0, nil, 0, 2048, EVP_sha256()) == 1)
        let output = try unsafe #require(BIO_new_file(folder.appending(path: file).path, "w"))
        try unsafe #require(i2d_PKCS12_bio(output, archive) == 1)
        unsafe BIO_free(output)
        unsafe PKCS12_free(archive)
    }

    private func bio(_ name: String, _ read: (OpaquePointer) -> OpaquePointer?) throws -> OpaquePointer {
        let input = try unsafe #require(BIO_new_file(folder.appending(path: name).path, "r"))
        defer { unsafe BIO_free(input) }
        return try unsafe #require(read(input))
    }
}

/// r and s in the format of the `openssl` tool, ECDSA-Sig-Value of RFC 3279: a SEQUENCE of two INTEGERs, with a leading zero only
/// if the number would otherwise be negative.
func ecdsaDER(_ signature: [UInt8]) -> [UInt8] {
    func integer(_ bytes: ArraySlice<UInt8>) -> [UInt8] {
        var bytes = Array(bytes.drop { $0 == 0 })
        if bytes.first ?? 0x80 >= 0x80 { bytes.insert(0, at: 0) }
        return [0x02, UInt8(bytes.count)] + bytes
    }
    let both = integer(signature.prefix(32)) + integer(signature.dropFirst(32))
    return [0x30, UInt8(both.count)] + both
}

// What the tests make is not secret.

extension SigningKey {
    convenience init(p8: [UInt8]) throws(CredentialError) {
        try self.init(p8: SecretBytes(p8))
    }
}

extension ClientCertificate {
    init(pem: [UInt8], key: [UInt8]? = nil, password: String? = nil, at now: Instant?) throws(CredentialError) {
        try self.init(
            pem: SecretBytes(pem), key: key.map { SecretBytes($0) }, password: password.map { SecretBytes($0.utf8) },
            at: now)
    }

    init(pkcs12: [UInt8], password: String?, at now: Instant?) throws(CredentialError) {
        try self.init(pkcs12: SecretBytes(pkcs12), password: password.map { SecretBytes($0.utf8) }, at: now)
    }
}
