internal import FoundationEssentials
internal import Glibc
internal import TokenModel

/// Where the configuration is: in one file, or in a folder of files.
enum ConfigurationPlace: Equatable {
    /// Only this file.
    case file(String)
    /// `tokenkeeperd.toml`, and then the fragments `conf.d/*.toml` in the order of their names. The service's password and keys are in
    /// `credentials` and `apns`. The path has no slash at its end.
    case folder(String)

    /// The folder of the package's service.
    static let usual = "/etc/tokenkeeperd"

    /// - Parameter path: A file or a folder, as somebody named it; nil for the usual folder.
    init(_ path: String?) {
        guard let path else {
            self = .folder(Self.usual)
            return
        }
        var about = stat()
        let isFolder = unsafe stat(path, &about) == 0 && about.st_mode & S_IFMT == S_IFDIR
        self = isFolder ? .folder(path.count > 1 && path.hasSuffix("/") ? String(path.dropLast()) : path) : .file(path)
    }

    /// The files with settings, in the order in which they are read. A later one overrides the earlier ones.
    ///
    /// - Throws: If a file cannot be read or is too large, or if somebody named a folder without any. The usual folder may have none.
    func files() throws(ConfigurationError) -> [ConfigurationText] {
        switch self {
        case .file(let path):
            return [try Self.read(path)]
        case .folder(let folder):
            let main = folder + "/tokenkeeperd.toml"
            let paths =
                (FileManager.default.fileExists(atPath: main) ? [main] : []) + (try Self.fragments(folder + "/conf.d"))
            if paths.isEmpty && folder != Self.usual {
                throw ConfigurationError(["\(folder): has neither tokenkeeperd.toml nor conf.d/*.toml"])
            }
            var texts: [ConfigurationText] = []
            for path in paths { texts.append(try Self.read(path)) }
            return texts
        }
    }

    /// The folder of the database's URL and password; nil for a single file.
    var credentialsFolder: String? { if case .folder(let folder) = self { folder + "/credentials" } else { nil } }

    /// The folder of keys and certificates for APNs.
    var keyFolder: String { if case .folder(let folder) = self { folder + "/apns/" } else { Self.usual + "/apns/" } }

    private static func fragments(_ folder: String) throws(ConfigurationError) -> [String] {
        let names: [String]
        do {
            names = try Folder.names(in: folder)
        } catch {
            throw ConfigurationError(["\(folder): cannot be read: \(error)"])
        }
        // Editors and Kubernetes have hidden files of their own.
        return names.filter { $0.hasSuffix(".toml") && !$0.hasPrefix(".") }.sorted().map { folder + "/" + $0 }
    }

    private static func read(_ path: String) throws(ConfigurationError) -> ConfigurationText {
        let bytes: SecretBytes
        do {
            bytes = try SecretBytes(contentsOf: path, limit: TOMLScanner.maximumSize)
        } catch {
            throw ConfigurationError(["\(path): cannot be read: \(error)"])
        }
        // Not wiped, and neither is a password in database_url: docs/how-to/connect-to-postgresql.md says so.
        return ConfigurationText(contents: bytes.unprotected, name: path)
    }
}

/// The contents of a configuration file, and its name for error messages.
struct ConfigurationText: Equatable {
    var contents: [UInt8]
    var name: String
}
