import Foundation
import PackagePlugin

/// Embeds the SQL files of `migrations/` and its folders in the library, and notices edited files. If a build was planned before a file
/// was added, touch `Package.swift`.
@main
struct EmbedMigrations: BuildToolPlugin {
    func createBuildCommands(context: PluginContext, target: any Target) throws -> [Command] {
        let folder = context.package.directoryURL.appending(path: "migrations")
        let names = try FileManager.default.subpathsOfDirectory(atPath: folder.path(percentEncoded: false)).filter {
            $0.hasSuffix(".sql")
        }
        .sorted()
        let files = names.map { folder.appending(path: $0) }
        let loadOrder = folder.appending(path: "load-order")
        let output = context.pluginWorkDirectoryURL.appending(path: "EmbeddedSQL.swift")
        return [
            .buildCommand(
                displayName: "Embedding \(files.count) files of migrations/",
                executable: try context.tool(named: "embed-migrations").url,
                arguments: [output.path(percentEncoded: false), folder.path(percentEncoded: false)]
                    + files.map { $0.path(percentEncoded: false) },
                inputFiles: files + [loadOrder],
                outputFiles: [output])
        ]
    }
}
