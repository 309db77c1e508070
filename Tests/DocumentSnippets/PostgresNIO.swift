import Foundation

// What the snippets use of PostgresNIO 1.21 to 1.30, with its signatures, so that they are compiled without it.

public final class PostgresClient: Sendable {
    @discardableResult
    public func query(_ query: PostgresQuery, file: String = #fileID, line: Int = #line) async throws
        -> PostgresRowSequence
    {
        PostgresRowSequence()
    }
}

public struct PostgresQuery: ExpressibleByStringInterpolation {
    public struct StringInterpolation: StringInterpolationProtocol {
        public init(literalCapacity: Int, interpolationCount: Int) {}
        public mutating func appendLiteral(_ literal: String) {}
        public mutating func appendInterpolation<Value: PostgresEncodable>(_ value: Value) {}
        public mutating func appendInterpolation<Value: PostgresEncodable>(_ value: Value?) {}
    }

    public init(stringLiteral value: String) {}
    public init(stringInterpolation: StringInterpolation) {}
}

public protocol PostgresEncodable {}
public protocol PostgresDecodable {}
extension String: PostgresEncodable, PostgresDecodable {}
extension Bool: PostgresEncodable, PostgresDecodable {}
extension Int: PostgresEncodable, PostgresDecodable {}
extension Date: PostgresEncodable, PostgresDecodable {}
extension Array: PostgresEncodable where Element: PostgresEncodable {}

public struct PostgresRow {}

public struct PostgresRowSequence: AsyncSequence {
    public struct AsyncIterator: AsyncIteratorProtocol {
        public mutating func next() async throws -> PostgresRow? { nil }
    }

    public func makeAsyncIterator() -> AsyncIterator { AsyncIterator() }

    public func decode<Column: PostgresDecodable>(_ type: Column.Type) -> AsyncThrowingMapSequence<Self, Column> {
        map { _ in throw CancellationError() }
    }
}
