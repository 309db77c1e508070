internal import FoundationEssentials
internal import TokenModel

/// The database's URL and password, if they have files of their own.
struct DatabaseCredentials: Equatable {
    /// The content of the URL's file.
    var databaseURL: String?
    /// The path of the password file, which is read for each connection.
    var databasePasswordFile: String?
    /// Whether systemd passed the files to this process. Then the password applies to whatever database is configured.
    var areHandedOver = false

    init() {}

    /// Takes the files that systemd passes with LoadCredential, which only the service can read.
    ///
    /// https://systemd.io/CREDENTIALS/
    ///
    /// - Parameter folder: The variable CREDENTIALS_DIRECTORY.
    /// - Throws: If the folder or the URL's file exists but cannot be read.
    init(handedOverIn folder: String) throws(ConfigurationError) {
        let names: [String]
        do {
            // During a reload, systemd hides the folder with the folder around it: then there are no credentials.
            names = FileManager.default.fileExists(atPath: folder) ? try Folder.names(in: folder) : []
        } catch {
            throw ConfigurationError(["\(folder), from CREDENTIALS_DIRECTORY: cannot be read: \(error)"])
        }
        for name in names where name.hasPrefix("database_") && !["database_url", "database_password"].contains(name) {
            ConfigurationOptions.complain(
                "warning: unknown systemd credential \(name), expected database_url or database_password")
        }
        try self.init(url: folder + "/database_url", password: folder + "/database_password")
        areHandedOver = true
    }

    /// Takes the service's own files, for a command that root runs by hand. Other users cannot read them. The unit passes the files
    /// `url` and `password` of this folder as the credentials `database_url` and `database_password`.
    init(ofServiceIn folder: String) throws(ConfigurationError) {
        try self.init(url: folder + "/url", password: folder + "/password")
    }

    private init(url: String, password: String) throws(ConfigurationError) {
        if FileManager.default.fileExists(atPath: url) {
            let bytes: SecretBytes
            do {
                bytes = try SecretBytes(contentsOf: url).firstLine
            } catch {
                throw ConfigurationError(["\(url): cannot be read: \(error)"])
            }
            guard let line = unsafe bytes.withBytes({ unsafe String(validating: $0, as: UTF8.self) }) else {
                throw ConfigurationError(["\(url): cannot be read: not UTF-8"])
            }
            if line.isEmpty { throw ConfigurationError(["\(url): is empty"]) }
            databaseURL = line
        }
        if FileManager.default.fileExists(atPath: password) { databasePasswordFile = password }
    }
}
