internal import CCurl
internal import Glibc
internal import TokenModel

/// What a client's thread does: hands requests to libcurl, lets it work, and takes what has ended from it.
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
        var swept = now
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
            if now - swept >= tick {
                swept = now
                sweep()
            }
            publish()
            if stopBy != nil, underWay == 0, scopes.values.allSatisfy(\.queue.isEmpty) { return }
            // What ended has made room: no wait before that is used.
            if scopes.values.contains(where: hasWork) { continue }
            multi.wait(milliseconds: underWay == 0 ? 60_000 : tick.wholeMilliseconds)
            rest(until: now + pace.interval(underWay: underWay))
        }
    }

    /// Sleeps, unless it is over.
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

    /// After a standstill another daemon may have been given all that this client has: nothing is begun, and nothing repeated.
    private func abandon() {
        endAtOnce { $0.delivery?.sends == 0 }
        for transfer in transfers { transfer.delivery?.repeatNoMore() }
    }

    /// Ends all that waits for its turn, and of what has been handed to libcurl that for which it holds.
    private func endAtOnce(_ holds: (Transfer) -> Bool) {
        for transfer in transfers {
            guard let delivery = transfer.delivery, holds(transfer) else { continue }
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
            // libcurl sends it again by itself, after the connection was lost.
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
                // It takes connections, and answers nothing.
                if !connection.hasAnswered { scope.backoff.failed(at: now) }
            }
        }
    }

    /// What takes too long. libcurl's own limits begin when it is handed a request, and would count its wait for a connection.
    private func sweep() {
        for transfer in transfers {
            guard var delivery = transfer.delivery else { continue }
            if let wentAt = transfer.wentAt {
                guard now - wentAt > options.answerTimeout else { continue }
                if let name = transfer.connection, let connection = table.connections[name], connection.heard <= wentAt
                {
                    // Nobody is at the other end; libcurl would go on using it.
                    OpenSockets.shutDown(connection.socket)
                }
                let turn = Delivery.Turn.failure(
                    .timeout, message: "no answer within \(options.answerTimeout)", wasSent: true)
                proceed(transfer, &delivery, after: turn)
            } else if now - transfer.handedAt > options.connectTimeout + .seconds(5) {
                // Perhaps libcurl has forgotten it.
                takeBack(transfer)
                scope(of: delivery).queue.giveBack(delivery)
            }
        }
    }

    // MARK: - Ending

    private func end(_ transfer: Transfer, _ code: CURLcode) {
        guard var delivery = transfer.delivery else { return multi.remove(transfer) }
        let scope = scope(of: delivery)
        let turn: Delivery.Turn
        switch transfer.obstacle {
        case .notYet:
            takeBack(transfer)
            scope.admission.cameBack(underWay: scope.underWay)
            scope.queue.giveBack(delivery)
            return
        case .notHTTP2:
            scope.backoff.failed(at: now)
            turn = .failure(.protocolError, message: "\(scope.server.host) does not speak HTTP/2", wasSent: false)
        case .often:
            turn = .failure(.connectionLost, message: "the connection was lost again", wasSent: true)
        case nil:
            turn = self.turn(transfer, code)
            if case .failure(let kind, _, _) = turn, kind.isOfConnecting {
                if table.answering(scope.server) > 0, scope.underWay > 1, delivery.sends == 0 {
                    // Another one works, and others are on it: it need not have one of its own.
                    takeBack(transfer)
                    scope.admission.cameBack(underWay: scope.underWay)
                    scope.queue.giveBack(delivery)
                    return
                }
                scope.backoff.failed(at: now)
            }
        }
        if code == CURLE_OK, let wentAt = transfer.wentAt { pace.answered(after: now - wentAt) }
        proceed(transfer, &delivery, after: turn)
    }

    private func turn(_ transfer: Transfer, _ code: CURLcode) -> Delivery.Turn {
        let answer = transfer.answer
        let wasSent = transfer.connection != nil
        if let head = answer.answer, wasSent {
            guard answer.isHTTP2 else {
                return .failure(.protocolError, message: "the answer is none of HTTP/2", wasSent: false)
            }
            if code == CURLE_OK { return .answer(head, isTorn: answer.isTorn) }
            // Accepted is accepted, whatever happens to the rest.
            if head.status == 200 || answer.length > ResponseParser.longest { return .answer(head, isTorn: false) }
        } else if code == CURLE_OK {
            return .failure(.protocolError, message: "an answer without a status", wasSent: wasSent)
        }
        let kind = PushFailure.Kind(code, wasSent: wasSent)
        return .failure(kind, message: transfer.message(code), wasSent: wasSent && !kind.isOfConnecting)
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

    /// Takes a transfer from libcurl, and makes it free for another request.
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
