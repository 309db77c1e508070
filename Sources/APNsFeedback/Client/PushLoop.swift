internal import CCurl
internal import Glibc
internal import TokenModel

/// The loop of a client's thread: hands requests to libcurl, lets it work, and takes what has ended.
final class PushLoop: TransferWatcher {
    private let mailbox: PushMailbox
    private let multi: MultiHandle
    private let identity: PushIdentity
    private let options: PushClientOptions
    private let ended: @Sendable () -> Void

    private var scopes: [Environment: ServerScope] = [:]
    private var table = ConnectionTable()
    private var transfers: [Transfer] = []
    private var free: [Transfer] = []
    private var outcomes: [PushOutcome] = []
    private var text = RequestText()
    private var pace = PollPace()
    private var now = ContinuousClock.now
    private var stopBy: ContinuousClock.Instant?

    init(
        _ mailbox: PushMailbox, _ multi: MultiHandle, _ identity: PushIdentity, _ options: PushClientOptions,
        ended: @escaping @Sendable () -> Void
    ) {
        self.mailbox = mailbox
        self.multi = multi
        self.identity = identity
        self.options = options
        self.ended = ended
        for environment in Environment.allCases {
            scopes[environment] = ServerScope(options.server(of: environment), most: max(1, options.inFlight))
        }
    }

    func run() {
        let tick = max(.milliseconds(10), min(.seconds(1), options.answerTimeout / 10))
        var checkedAt = now
        while true {
            let turnBegan = now
            now = .now
            let stoodStill = underWay > 0 && now - turnBegan > options.standstill
            takeRequests()
            if stoodStill { abandon() }
            for scope in scopes.values { admit(scope) }
            multi.perform()
            while let (transfer, code) = multi.nextEnded() { end(transfer, code) }
            noteClosedConnections()
            if now - checkedAt >= tick {
                checkedAt = now
                endOverdue()
            }
            publish()
            if stopBy != nil, underWay == 0, scopes.values.allSatisfy(\.queue.isEmpty) { return }
            // What ended has made room: use it before waiting.
            if scopes.values.contains(where: hasWork) { continue }
            multi.wait(milliseconds: underWay == 0 ? 60_000 : tick.wholeMilliseconds)
            rest(until: now + pace.interval(underWay: underWay))
        }
    }

    /// Sleeps until then, if that is still ahead.
    private func rest(until end: ContinuousClock.Instant) {
        let left = ContinuousClock.now.duration(to: end)
        if left > .microseconds(50) { usleep(UInt32(left.components.attoseconds / 1_000_000_000_000)) }
    }

    private var underWay: Int { scopes.values.reduce(0) { $0 + $1.underWay } }

    private func hasWork(_ scope: ServerScope) -> Bool {
        !scope.queue.isEmpty && scope.underWay < limit(scope)
    }

    private func limit(_ scope: ServerScope) -> Int {
        table.isDraining(scope.server) ? 0 : scope.admission.limit(answering: table.answering(scope.server))
    }

    private func scope(of delivery: Delivery) -> ServerScope {
        scopes[delivery.request.address.environment]!
    }

    // MARK: - Beginning

    private func takeRequests() {
        let (requests, stopBy) = mailbox.takeRequests()
        for request in requests {
            let delivery = Delivery(request)
            if let fault = request.fault {
                outcomes.append(delivery.outcome(.unsendable(fault)))
            } else {
                scope(of: delivery).queue.append(delivery)
            }
        }
        self.stopBy = stopBy
        guard let stopBy else { return }
        endAtOnce { $0.connection == nil || now >= stopBy }
    }

    /// After a standstill, another daemon may have taken over all requests of this client: begins nothing and repeats nothing.
    private func abandon() {
        endAtOnce { $0.delivery?.sends == 0 }
        for transfer in transfers { transfer.delivery?.repeatNoMore() }
    }

    /// Ends all queued requests, and those handed to libcurl that meet the condition.
    private func endAtOnce(_ condition: (Transfer) -> Bool) {
        for transfer in transfers {
            guard let delivery = transfer.delivery, condition(transfer) else { continue }
            takeBack(transfer)
            outcomes.append(delivery.outcome(delivery.endAtStop))
        }
        for scope in scopes.values { outcomes += scope.queue.takeAll().map { $0.outcome($0.endAtStop) } }
    }

    private func admit(_ scope: ServerScope) {
        if let pause = scope.backoff.remaining(at: now), table.answering(scope.server) == 0 {
            for delivery in scope.queue.takeAll() {
                outcomes.append(delivery.outcome(delivery.endInPause(pause, host: scope.server.host)))
            }
            return
        }
        let limit = limit(scope)
        while scope.underWay < limit, let delivery = scope.queue.next() { begin(delivery, scope) }
    }

    private func begin(_ delivery: Delivery, _ scope: ServerScope) {
        var delivery = delivery
        do {
            delivery.authorization = try identity.authorization?()
        } catch {
            outcomes.append(delivery.outcome(delivery.failed(.identity, "no provider token: \(error)")))
            return
        }
        guard let transfer = free.popLast() ?? newTransfer() else {
            outcomes.append(delivery.outcome(delivery.failed(.other, "out of memory")))
            return
        }
        text.write(delivery.request, devices: scope.devices, authorization: delivery.authorization)
        transfer.load(text, payload: delivery.request.payload)
        transfer.delivery = delivery
        transfer.handedAt = now
        scope.underWay += 1
        if let message = multi.add(transfer) {
            takeBack(transfer)
            outcomes.append(delivery.outcome(delivery.failed(.other, message)))
        }
    }

    private func newTransfer() -> Transfer? {
        guard let transfer = Transfer(self, sockets: multi.sockets, identity: identity, options: options) else {
            return nil
        }
        transfers.append(transfer)
        return transfer
    }

    // MARK: - Under way

    func mayGo(_ transfer: Transfer, on name: ConnectionTable.Name) -> Bool {
        noteClosedConnections()
        if let old = transfer.connection {
            // libcurl lost the connection, and sends the request again by itself.
            leave(old)
            transfer.connection = nil
        }
        guard let scope = transfer.delivery.map(scope) else { return false }
        switch table.place(on: name) {
        case .unproven, .unfit:
            transfer.obstacle = .notYet
            return false
        case .new:
            guard transfer.hasAgreedOnHTTP2 else {
                transfer.obstacle = .notHTTP2
                return false
            }
            let socket = multi.sockets.socket(localPort: name.localPort) ?? -1
            table.open(name, ConnectionTable.Connection(server: scope.server, socket: socket, heard: now))
        case .free: break
        }
        guard transfer.delivery?.goes(at: .now) == true else {
            transfer.obstacle = .often
            return false
        }
        transfer.answer.clear()
        transfer.connection = name
        transfer.wentAt = now
        table.join(name)
        return true
    }

    func heard(_ transfer: Transfer) {
        guard let name = transfer.connection, table.heard(name, at: now), let delivery = transfer.delivery else {
            return
        }
        let scope = scope(of: delivery)
        scope.admission.connectionsChanged()
        scope.backoff.answered()
    }

    private func noteClosedConnections() {
        for socket in multi.sockets.takeClosed() {
            guard let connection = table.closed(socket: socket) else { continue }
            for scope in scopes.values where scope.server == connection.server {
                scope.admission.connectionsChanged()
                // The server accepts connections and never responds.
                if !connection.hasAnswered { scope.backoff.failed(at: now) }
            }
        }
    }

    /// Ends what takes too long. libcurl's own timeouts begin when it gets a request, and would include its wait for a connection.
    private func endOverdue() {
        for transfer in transfers {
            guard var delivery = transfer.delivery else { continue }
            if let wentAt = transfer.wentAt {
                guard now - wentAt > options.answerTimeout else { continue }
                if let name = transfer.connection, let connection = table.connections[name], connection.heard <= wentAt
                {
                    // Nothing came since the request left: the connection is dead, and libcurl would go on using it.
                    OpenSockets.shutDown(connection.socket)
                }
                let turn = Delivery.Turn.failure(
                    .timeout, message: "no response within \(options.answerTimeout)", wasSent: true)
                proceed(transfer, &delivery, after: turn)
            } else if now - transfer.handedAt > options.connectTimeout + .seconds(5) {
                // libcurl may have lost track of it.
                takeBack(transfer)
                scope(of: delivery).queue.giveBack(delivery)
            }
        }
    }

    // MARK: - Ending

    private func end(_ transfer: Transfer, _ code: CURLcode) {
        guard var delivery = transfer.delivery else { return multi.remove(transfer) }
        if transfer.obstacle == .notYet { return queueAgain(transfer, delivery) }
        let scope = scope(of: delivery)
        let turn = transfer.turn(code, host: scope.server.host)
        switch (transfer.obstacle, turn) {
        case (.notHTTP2, _): scope.backoff.failed(at: now)
        case (nil, .failure(let kind, _, _)) where kind.isOfConnecting:
            // Another connection works and has requests: this request can use that one.
            if table.answering(scope.server) > 0, scope.underWay > 1, delivery.sends == 0 {
                return queueAgain(transfer, delivery)
            }
            scope.backoff.failed(at: now)
        default: break
        }
        if code == CURLE_OK, let wentAt = transfer.wentAt { pace.answered(after: now - wentAt) }
        proceed(transfer, &delivery, after: turn)
    }

    /// The request came back unsent, and waits until there is room on a connection.
    private func queueAgain(_ transfer: Transfer, _ delivery: Delivery) {
        takeBack(transfer)
        let scope = scope(of: delivery)
        scope.admission.cameBack(underWay: scope.underWay)
        scope.queue.giveBack(delivery)
    }

    private func proceed(_ transfer: Transfer, _ delivery: inout Delivery, after turn: Delivery.Turn) {
        let step = delivery.step(after: turn, renew: { identity.renew?($0) ?? false })
        if case .again(connectionIsUnfit: true) = step, let name = transfer.connection { table.isUnfit(name) }
        takeBack(transfer)
        switch step {
        case .ends(let end): outcomes.append(delivery.outcome(end))
        case .again: scope(of: delivery).queue.giveBack(delivery)
        }
    }

    private func leave(_ name: ConnectionTable.Name) {
        if let socket = table.leave(name) { OpenSockets.shutDown(socket) }
    }

    /// Takes a transfer from libcurl, and frees it for another request.
    private func takeBack(_ transfer: Transfer) {
        multi.remove(transfer)
        if let name = transfer.connection { leave(name) }
        if let delivery = transfer.delivery { scope(of: delivery).underWay -= 1 }
        transfer.connection = nil
        transfer.delivery = nil
        free.append(transfer)
    }

    private func publish() {
        var state = PushClientState(opened: table.opened)
        state.queued = scopes.values.reduce(0) { $0 + $1.queue.count }
        state.inFlight = underWay
        state.connectionsOpen = multi.sockets.openCount
        let haveEnded = !outcomes.isEmpty
        mailbox.put(&outcomes, state)
        if haveEnded { ended() }
    }
}
