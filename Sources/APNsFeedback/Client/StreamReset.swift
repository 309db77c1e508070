internal import Glibc

/// Functions of libnghttp2, which libcurl uses. Looked up at first use: libcurl may have been built without it.
private enum NGHTTP2 {
    typealias Submit = @convention(c) (OpaquePointer?, UInt8, Int32, UInt32) -> Int32
    typealias Find = @convention(c) (OpaquePointer?, Int32) -> OpaquePointer?

    static let submit = unsafe symbol("nghttp2_submit_rst_stream").map { unsafe unsafeBitCast($0, to: Submit.self) }
    static let find = unsafe symbol("nghttp2_session_find_stream").map { unsafe unsafeBitCast($0, to: Find.self) }

    /// The next definition after ours: RTLD_NEXT.
    private static func symbol(_ name: String) -> UnsafeMutableRawPointer? {
        unsafe dlsym(UnsafeMutableRawPointer(bitPattern: -1), name)
    }
}

/// Replaces libnghttp2's function of the same name for libcurl: the linker finds this one first. It drops resets of streams that have
/// ended, as libnghttp2 itself does since 1.66.
///
/// libcurl before 8.0 resets every stream whose response has no `content-length`, even after its end, and APNs sends none. Since
/// CVE-2023-44487, servers count resets (Netty and NIO close a connection after 200 within 30 seconds), and the requests in flight
/// are then sent twice.
@c(nghttp2_submit_rst_stream)
public func submitResetOfOpenStream(_ session: OpaquePointer?, _ flags: UInt8, _ stream: Int32, _ code: UInt32) -> Int32
{
    if let find = unsafe NGHTTP2.find, unsafe find(session, stream) == nil { return 0 }
    return unsafe NGHTTP2.submit?(session, flags, stream, code) ?? 0
}
