internal import Glibc
internal import TokenLedger

/// A file that holds a password or a private key, with its permissions.
struct SecretFile: Equatable {
    let path: String
    let mode: mode_t
    let owner: uid_t
    let group: gid_t

    /// Nil if there is no such file.
    init?(_ path: String) {
        var about = stat()
        guard unsafe stat(path, &about) == 0 else { return nil }
        self.init(path, mode: about.st_mode, owner: about.st_uid, group: about.st_gid)
    }

    init(_ path: String, mode: mode_t, owner: uid_t, group: gid_t) {
        self.path = path
        self.mode = mode & 0o7777
        self.owner = owner
        self.group = group
    }

    /// Whether libpq would refuse it as a private key. A file of root may be readable by its group (0640), a file of any other
    /// user only by its owner (0600).
    ///
    /// https://www.postgresql.org/docs/current/libpq-ssl.html#LIBPQ-SSL-CLIENTCERT
    var isTooOpen: Bool { mode & (owner == 0 ? 0o037 : 0o077) != 0 }

    /// The command that makes the permissions strict enough.
    ///
    /// - Parameter processGroup: The group of this process, which is to read the file.
    func cure(processGroup: gid_t = getegid(), processUser: uid_t = geteuid()) -> String {
        let word = ShellWord.quoted(path)
        if owner != 0 || (group == 0 && processUser == 0) { return "chmod 600 \(word)" }
        return group != 0 ? "chmod 640 \(word)" : "chgrp \(processGroup) \(word) && chmod 640 \(word)"
    }

    /// - Returns: Nil if the permissions are strict enough.
    func warning(processGroup: gid_t = getegid(), processUser: uid_t = geteuid()) -> String? {
        guard isTooOpen else { return nil }
        let cure = cure(processGroup: processGroup, processUser: processUser)
        let digits = String(mode, radix: 8)
        let octal = String(repeating: "0", count: max(0, 4 - digits.count)) + digits
        return "\(path) holds a secret, and others on this machine can read it (mode \(octal)): run `\(cure)`"
    }
}
