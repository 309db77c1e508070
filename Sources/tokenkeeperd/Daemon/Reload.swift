internal import Logging

/// SIGHUP reloads the configuration. Settings that need a restart are named, and an error leaves everything as it was.
struct Reload: Sendable {
    let options: ConfigurationOptions
    let settings: LiveConfiguration
    let report: ServiceNotifier
    let logger: Logger

    func perform() {
        report.reloading()
        do {
            let outcome = settings.take(try options.read())
            var logger = logger
            logger.logLevel = settings.current.logLevel
            logger.notice(
                "reloaded",
                metadata: ["changed": outcome.taken.isEmpty ? "nothing" : "\(outcome.taken.joined(separator: ", "))"])
            if !outcome.waiting.isEmpty {
                logger.warning(
                    "these settings take effect at a restart",
                    metadata: ["keys": "\(outcome.waiting.joined(separator: ", "))"])
            }
            report.reloaded(refusal: nil)
        } catch {
            logger.error(
                "reload refused: the earlier configuration stays in force",
                metadata: ["problems": "\(error.problems.joined(separator: "; "))"])
            report.reloaded(refusal: error.problems.first)
        }
    }
}
