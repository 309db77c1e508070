internal import FoundationEssentials

/// What systemd hands over with LoadCredential: files that the service alone can read.
///
/// https://systemd.io/CREDENTIALS/
struct Credentials: Equatable {
    /// The credential `database_url`, read.
    var databaseURL: String?
    /// Where the credential `database_password` stands.
    var databasePasswordFile: String?

    init() {}

    /// - Parameter folder: The variable CREDENTIALS_DIRECTORY.
    /// - Throws: When a credential is there and cannot be read.
    init(folder: String?) throws(ConfigurationError) {
        guard let folder else { return }
        let url = folder + "/database_url"
        if FileManager.default.fileExists(atPath: url) {
            guard let bytes = try? Data(contentsOf: URL(filePath: url)),
                let text = String(validating: bytes, as: UTF8.self)
            else { throw ConfigurationError(["\(url): cannot be read"]) }
            databaseURL = String(text.prefix { !$0.isNewline })
        }
        let password = folder + "/database_password"
        if FileManager.default.fileExists(atPath: password) { databasePasswordFile = password }
    }
}
