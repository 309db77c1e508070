internal import FoundationEssentials
internal import TokenModel

/// The database's URL and password, where they are kept in files of their own.
struct DatabaseCredentials: Equatable {
    /// A file's contents.
    var databaseURL: String?
    /// A file's path: it is read for each connection.
    var databasePasswordFile: String?
    /// Given to this very process, and so meant for whatever database it is told.
    var areHandedOver = false

    /// What the unit hands over: `url` and `password` in it become the credentials `database_url` and `database_password`.
    static let folderOfService = "/etc/tokenkeeperd/credentials"

    init() {}

    /// As systemd hands them over with LoadCredential, in files that the service alone can read.
    ///
    /// https://systemd.io/CREDENTIALS/
    ///
    /// - Parameter folder: The variable CREDENTIALS_DIRECTORY.
    /// - Throws: When the folder or the URL in it is there and cannot be read.
    init(handedOverIn folder: String) throws(ConfigurationError) {
        let isThere = FileManager.default.fileExists(atPath: folder)
        guard let names = isThere ? try? FileManager.default.contentsOfDirectory(atPath: folder) : [] else {
            throw ConfigurationError(["\(folder), from CREDENTIALS_DIRECTORY: cannot be read"])
        }
        for name in names where name.hasPrefix("database_") && !["database_url", "database_password"].contains(name) {
            ConfigurationOptions.complain(
                "warning: \(name) is no credential that is known here; known are database_url and database_password")
        }
        try self.init(url: folder + "/database_url", password: folder + "/database_password")
        areHandedOver = true
    }

    /// The service's own, for a command that root gives by hand; none for anybody else.
    init(ofServiceIn folder: String) throws(ConfigurationError) {
        try self.init(url: folder + "/url", password: folder + "/password")
    }

    private init(url: String, password: String) throws(ConfigurationError) {
        if FileManager.default.fileExists(atPath: url) {
            guard let bytes = SecretBytes(contentsOf: url)?.firstLine,
                let line = unsafe bytes.withBytes({ unsafe String(validating: $0, as: UTF8.self) })
            else { throw ConfigurationError(["\(url): cannot be read"]) }
            if line.isEmpty { throw ConfigurationError(["\(url): is empty"]) }
            databaseURL = line
        }
        if FileManager.default.fileExists(atPath: password) { databasePasswordFile = password }
    }
}
