import COpenSSL

/// Reads PEM with one of OpenSSL's functions.
enum PEM {
    /// - Parameter reader: Reads from a memory BIO, which does not copy the text: the text must stay in place until the reader returns.
    static func read(_ pem: String, _ reader: (OpaquePointer?) -> OpaquePointer?) -> OpaquePointer? {
        Array(pem.utf8).withUnsafeBytes { text in
            let memory = BIO_new_mem_buf(text.baseAddress, Int32(text.count))
            defer { BIO_free(memory) }
            return reader(memory)
        }
    }
}
