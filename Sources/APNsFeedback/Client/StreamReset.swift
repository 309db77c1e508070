internal import Glibc

/// libnghttp2's functions behind libcurl. Looked up when they are first wanted: libcurl may have been made without.
private enum NGHTTP2 {
    typealias Submit = @convention(c) (OpaquePointer?, UInt8, Int32, UInt32) -> Int32
    typealias Find = @convention(c) (OpaquePointer?, Int32) -> OpaquePointer?

    static let submit = unsafe symbol("nghttp2_submit_rst_stream").map { unsafe unsafeBitCast($0, to: Submit.self) }
    static let find = unsafe symbol("nghttp2_session_find_stream").map { unsafe unsafeBitCast($0, to: Find.self) }

    /// The one behind our own: RTLD_NEXT.
    private static func symbol(_ name: String) -> UnsafeMutableRawPointer? {
        unsafe dlsym(UnsafeMutableRawPointer(bitPattern: -1), name)
    }
}

/// What libcurl calls instead of libnghttp2's function of that name: the linker looks here first. It leaves out resets of streams that
/// have ended, as libnghttp2 does by itself since 1.66.
///
/// libcurl before 8.0 forgets that a stream has ended once it has said so, and resets it: every one whose answer has no `content-length`, and
/// those of APNs have none. Servers count resets since CVE-2023-44487 (Netty's and NIO's end a connection after 200 within 30 seconds),
/// and what is under way then goes out twice.
@c(nghttp2_submit_rst_stream)
public func submitResetOfOpenStream(_ session: OpaquePointer?, _ flags: UInt8, _ stream: Int32, _ code: UInt32) -> Int32
{
    if let find = unsafe NGHTTP2.find, unsafe find(session, stream) == nil { return 0 }
    return unsafe NGHTTP2.submit?(session, flags, stream, code) ?? 0
}
