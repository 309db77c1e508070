internal import Glibc
internal import TokenModel

enum Folder {
    /// The names of what is in a folder; none if there is no folder.
    static func names(in path: String) throws(UnreadableFile) -> [String] {
        guard let folder = unsafe opendir(path) else {
            if errno == ENOENT { return [] }
            throw UnreadableFile(error: errno)
        }
        defer { unsafe closedir(folder) }
        var names: [String] = []
        while true {
            errno = 0
            guard let entry = unsafe readdir(folder) else { break }
            names.append(
                unsafe withUnsafePointer(to: &entry.pointee.d_name) {
                    unsafe $0.withMemoryRebound(to: CChar.self, capacity: 256) { unsafe String(cString: $0) }
                })
        }
        if errno != 0 { throw UnreadableFile(error: errno) }
        return names.filter { $0 != "." && $0 != ".." }
    }
}
