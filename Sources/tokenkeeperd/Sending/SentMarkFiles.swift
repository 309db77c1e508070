internal import FoundationEssentials
internal import Glibc

/// The files in the runtime directory in which the daemons of this machine mark what they may have sent: one for each daemon.
struct SentMarkFiles {
    let directory: String

    private static let prefix = "sent-"

    /// The file's name contains the daemon's id, with colons in place of slashes.
    private func path(of daemonID: String) -> String {
        "\(directory)/\(Self.prefix)\(String(daemonID.map { $0 == "/" ? ":" : $0 }))"
    }

    func create(for daemonID: String, slots: Int) throws(MappedWords.Failure) -> SentMarks {
        try SentMarks(creating: path(of: daemonID), slots: slots)
    }

    /// The requests of an ended daemon that may have been sent; nil if that is not known.
    func sent(by daemonID: String) -> Set<Int64>? { SentMarks.sent(in: path(of: daemonID)) }

    /// The daemons that have a file.
    var daemons: [String] {
        let names = (try? FileManager.default.contentsOfDirectory(atPath: directory)) ?? []
        return names.filter { $0.hasPrefix(Self.prefix) }.map {
            String($0.dropFirst(Self.prefix.count).map { $0 == ":" ? "/" : $0 })
        }
    }

    func remove(_ daemonID: String) {
        _ = unsafe unlink(path(of: daemonID))
    }
}
