#pragma once
#include <curl/curl.h>
#include <openssl/ssl.h>

/* Swift cannot call variadic functions such as curl_easy_setopt: one function for each kind of argument. */

static inline CURLcode ck_set_long(CURL *easy, CURLoption option, long value) {
    return curl_easy_setopt(easy, option, value);
}

static inline CURLcode ck_set_text(CURL *easy, CURLoption option, const char *value) {
    return curl_easy_setopt(easy, option, value);
}

static inline CURLcode ck_set_pointer(CURL *easy, CURLoption option, void *value) {
    return curl_easy_setopt(easy, option, value);
}

/* libcurl copies the bytes. */
static inline CURLcode ck_set_blob(CURL *easy, CURLoption option, const void *bytes, size_t count) {
    struct curl_blob blob = { (void *)bytes, count, CURL_BLOB_COPY };
    return curl_easy_setopt(easy, option, &blob);
}

/* libcurl reads the bytes where they are, until the handle is freed: https://curl.se/libcurl/c/CURLOPT_SSLKEY_BLOB.html */
static inline CURLcode ck_set_lasting_blob(CURL *easy, CURLoption option, const void *bytes, size_t count) {
    struct curl_blob blob = { (void *)bytes, count, CURL_BLOB_NOCOPY };
    return curl_easy_setopt(easy, option, &blob);
}

static inline CURLcode ck_set_trace(CURL *easy, curl_debug_callback callback) {
    return curl_easy_setopt(easy, CURLOPT_DEBUGFUNCTION, callback);
}

/* Takes a part of what the server sends; returns how much it has taken. */
typedef size_t (*ck_receiver)(const char *bytes, size_t size, size_t count, void *user);

static inline CURLcode ck_set_receiver(CURL *easy, CURLoption function, CURLoption data, ck_receiver receiver, void *user) {
    CURLcode code = curl_easy_setopt(easy, function, receiver);
    return code == CURLE_OK ? curl_easy_setopt(easy, data, user) : code;
}

static inline CURLcode ck_get_long(CURL *easy, CURLINFO info, long *value) {
    return curl_easy_getinfo(easy, info, value);
}

static inline CURLcode ck_get_pointer(CURL *easy, CURLINFO info, void **value) {
    return curl_easy_getinfo(easy, info, value);
}

static inline CURLcode ck_global_init(void) { return curl_global_init(CURL_GLOBAL_DEFAULT); }

/* The file of certificates that libcurl was built to trust; NULL if it has none. */
static inline const char *ck_trusted_file(void) { return curl_version_info(CURLVERSION_NOW)->cainfo; }

static inline CURLcode ck_get_socket(CURL *easy, curl_socket_t *socket) {
    return curl_easy_getinfo(easy, CURLINFO_ACTIVESOCKET, socket);
}

/* What the client sets of TLS, and libcurl does not. libcurl calls this for the connection to an HTTPS proxy as well, which
   speaks HTTP/1.1. The proxy's is the one that names its highest version of TLS: see ck_set_tls_setup. */
static inline CURLcode ck_set_up_tls(CURL *easy, void *context, void *user) {
    SSL_CTX *tls = (SSL_CTX *)context;
    (void)easy;
    (void)user;
    if (SSL_CTX_get_max_proto_version(tls) != 0) {
        return SSL_CTX_set_alpn_protos(tls, (const unsigned char *)"\x08http/1.1", 9) ? CURLE_SSL_CONNECT_ERROR : CURLE_OK;
    }
    /* A write ends with each record, and its repetition may come from another address. */
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    /* One system call for as many records as have arrived, instead of two for each. The reader reads until nothing is left. */
    SSL_CTX_set_read_ahead(tls, 1);
    SSL_CTX_set_default_read_buffer_len(tls, 65536);
    return SSL_CTX_set_alpn_protos(tls, (const unsigned char *)"\x02h2", 3) ? CURLE_SSL_CONNECT_ERROR : CURLE_OK;
}

/* TLS 1.2 or newer, and ck_set_up_tls. */
static inline CURLcode ck_set_tls_setup(CURL *easy) {
    CURLcode code = curl_easy_setopt(easy, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    if (code == CURLE_OK)
        code = curl_easy_setopt(
            easy, CURLOPT_PROXY_SSLVERSION, (long)(CURL_SSLVERSION_TLSv1_2 | CURL_SSLVERSION_MAX_TLSv1_3));
    if (code == CURLE_OK) code = curl_easy_setopt(easy, CURLOPT_SSL_CTX_FUNCTION, ck_set_up_tls);
    return code;
}

/* NULL before the first curl_easy_recv. */
static inline const SSL *ck_tls(CURL *easy) {
    struct curl_tlssessioninfo *session = NULL;
    if (curl_easy_getinfo(easy, CURLINFO_TLS_SSL_PTR, &session) != CURLE_OK || !session) return NULL;
    return session->backend == CURLSSLBACKEND_OPENSSL ? (const SSL *)session->internals : NULL;
}

/* Whether ALPN chose HTTP/2. */
static inline int ck_has_agreed_on_h2(CURL *easy) {
    const SSL *tls = ck_tls(easy);
    const unsigned char *name = NULL;
    unsigned int length = 0;
    if (!tls) return 0;
    SSL_get0_alpn_selected(tls, &name, &length);
    return length == 2 && name[0] == 'h' && name[1] == '2';
}

/* Whether the last call that could not go on waits until the socket can be written to. */
static inline int ck_waits_for_writing(CURL *easy) {
    const SSL *tls = ck_tls(easy);
    return tls && SSL_want(tls) == SSL_WRITING;
}
