/// Which characters the database can hold. One that it cannot would fail the whole batch.
package struct ServerEncoding {
    private let isUnicode: Bool
    /// Whether it holds every character of Unicode.
    package let holdsAll: Bool
    /// What was tried.
    private var known: [Unicode.Scalar: Bool] = [:]

    package init(of connection: inout Connection) throws(DatabaseError) {
        let name = try connection.query("SELECT getdatabaseencoding()::text").value(String.self)
        isUnicode = name == "UTF8"
        // SQL_ASCII stores the bytes as they come.
        holdsAll = isUnicode || name == "SQL_ASCII"
    }

    /// A text that may be cut anywhere: where characters are bytes, a part of one could not be sent back.
    package func divisible(_ text: String) -> String {
        isUnicode ? text : String(String.UnicodeScalarView(text.unicodeScalars.map { $0.isASCII ? $0 : "?" }))
    }

    /// The first character of a text that the database cannot hold; nil if there is none.
    package mutating func lacks(
        _ text: some Sequence<Unicode.Scalar>, on connection: inout Connection
    ) throws(DatabaseError) -> Unicode.Scalar? {
        if holdsAll { return nil }
        for scalar in text where !scalar.isASCII {
            if known[scalar] == nil { known[scalar] = try Self.holds(scalar, on: &connection) }
            if known[scalar] == false { return scalar }
        }
        return nil
    }

    private static func holds(_ scalar: Unicode.Scalar, on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            return try connection.query("SELECT octet_length($1)", [.text(String(scalar))]).value(Int32.self) > 0
        } catch  where error.sqlState == "22P05" || error.sqlState == "22021" {
            return false
        }
    }
}
