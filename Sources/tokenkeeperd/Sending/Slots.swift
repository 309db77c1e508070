/// Gives each request that a client has a slot: a number that no other request has until this one's ending is in the database. Pure.
///
/// A slot below the capacity has a place in the file of `SentMarks`. A slot beyond it has none.
struct Slots {
    private let capacity: Int
    private var slots: [Int64: Int] = [:]
    private var free: [Int] = []
    /// How many slots of the file were ever used.
    private var used = 0
    /// The last slot that was given beyond the capacity. None of these is given twice.
    private var lastBeyond: Int
    /// How many requests have a slot that the file does not have.
    private(set) var beyond = 0

    init(capacity: Int) {
        self.capacity = capacity
        lastBeyond = capacity
    }

    /// The slot of a request; nil if it has none.
    subscript(number: Int64) -> Int? { slots[number] }

    /// - Parameter number: The `request_id`.
    mutating func take(_ number: Int64) -> Int {
        if let slot = slots[number] { return slot }
        let slot: Int
        if let last = free.popLast() {
            slot = last
        } else if used < capacity {
            slot = used
            used += 1
        } else {
            lastBeyond += 1
            slot = lastBeyond
            beyond += 1
        }
        slots[number] = slot
        return slot
    }

    /// - Returns: The slot that is free now; nil if the request had none.
    mutating func release(_ number: Int64) -> Int? {
        guard let slot = slots.removeValue(forKey: number) else { return nil }
        if slot < capacity { free.append(slot) } else { beyond -= 1 }
        return slot
    }
}
