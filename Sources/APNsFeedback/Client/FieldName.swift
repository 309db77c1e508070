/// The names of fields, where libnghttp2 may keep pointers to them.
///
/// Sendable: the bytes are never freed and never change.
@safe struct FieldName: @unchecked Sendable {
    let start: UnsafePointer<UInt8>
    let count: Int

    static let all: [RequestHeaders.Name: FieldName] = Dictionary(
        uniqueKeysWithValues: RequestHeaders.Name.allCases.map { name in
            let bytes = UnsafeMutableBufferPointer<UInt8>.allocate(capacity: name.rawValue.utf8.count)
            _ = unsafe bytes.initialize(fromContentsOf: Array(name.rawValue.utf8))
            return unsafe (name, FieldName(start: bytes.baseAddress!, count: bytes.count))
        })
}
