internal import APNsFeedback
internal import FoundationEssentials
internal import Synchronization
internal import TokenModel

/// A configured credential as its client uses it: its files are read again when they change. A credential whose files cannot be used stops its own topics
/// and nothing else.
final class CredentialSource: Sendable {
    let settings: CredentialSettings

    private struct State {
        /// As the files last could be used.
        var loaded: LoadedCredential?
        /// Why they cannot be used as they are now.
        var fault: String?
        /// What tells that a file was replaced.
        var stamps: [String]
    }

    private let folders: [String]
    private let tokens: SharedProviderTokens
    private let state: Mutex<State>

    /// - Parameter folders: The folders in which to look for a file that is named without one.
    init(_ settings: CredentialSettings, folders: [String], _ tokens: SharedProviderTokens) {
        self.settings = settings
        self.folders = folders
        self.tokens = tokens
        let files = CredentialFiles(settings: settings, folders: folders)
        var state = State(stamps: files.stamps)
        Self.read(settings, folders, tokens, into: &state)
        self.state = Mutex(state)
    }

    /// Nil if its files could never be used.
    var loaded: LoadedCredential? { state.withLock { $0.loaded } }

    /// One sentence; nil if its files can be used.
    var fault: String? {
        state.withLock { state in
            state.fault.map { state.loaded == nil ? $0 : "\($0); what its files had before is used until they can be" }
        }
    }

    /// What a client proves itself with now.
    ///
    /// - Throws: Why there is nothing.
    func identity() throws -> PushIdentity {
        let (loaded, fault) = state.withLock { ($0.loaded, $0.fault) }
        guard let loaded else { throw ConfigurationError([fault ?? "its files were not read"]) }
        return loaded.identity
    }

    /// Reads the files again if one has changed, or if they could not be used. Call it from one thread.
    ///
    /// - Returns: Whether there is something new to use.
    func refresh() -> Bool {
        // Not while the lock is held: the client asks for each request, and a file may take long.
        var now = state.withLock { $0 }
        let stamps = CredentialFiles(settings: settings, folders: folders).stamps
        if now.fault == nil, now.stamps == stamps { return false }
        let before = now.loaded?.files
        now.stamps = stamps
        Self.read(settings, folders, tokens, into: &now)
        state.withLock { $0 = now }
        return now.fault == nil && now.loaded?.files != before
    }

    private static func read(
        _ settings: CredentialSettings, _ folders: [String], _ tokens: SharedProviderTokens, into state: inout State
    ) {
        do {
            state.loaded = try tokens.load { tokens throws(ConfigurationError) in
                try LoadedCredential(settings, folders: folders, &tokens)
            }
            state.fault = nil
        } catch {
            state.fault = error.problems.joined(separator: "; ")
        }
    }
}

extension CredentialSource: CustomStringConvertible {
    var description: String { loaded.map { "\($0)" } ?? "credential \(settings.name): \(fault ?? "unused")" }
}

/// The provider tokens of all credentials, for several threads.
final class SharedProviderTokens: Sendable {
    private let tokens: Mutex<ProviderTokens>

    init(_ tokens: ProviderTokens) { self.tokens = Mutex(tokens) }

    func load(
        _ work: (inout ProviderTokens) throws(ConfigurationError) -> LoadedCredential
    ) throws(ConfigurationError) -> LoadedCredential {
        try tokens.withLock { tokens throws(ConfigurationError) in try work(&tokens) }
    }
}

/// A person wants the files of the credentials to be read again, by SIGHUP.
final class CredentialRefresh: Sendable {
    private let isAsked = Atomic(false)

    func ask() { isAsked.store(true, ordering: .releasing) }

    /// Whether anybody has asked since the last call.
    func take() -> Bool { isAsked.exchange(false, ordering: .acquiringAndReleasing) }
}
