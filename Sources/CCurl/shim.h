#pragma once
#include <curl/curl.h>
#include <openssl/ssl.h>

/* Swift cannot call variadic functions such as curl_easy_setopt: one function for each kind of argument. */

static inline CURLcode ck_set_long(CURL *easy, CURLoption option, long value) {
    return curl_easy_setopt(easy, option, value);
}

static inline CURLcode ck_set_size(CURL *easy, CURLoption option, curl_off_t value) {
    return curl_easy_setopt(easy, option, value);
}

static inline CURLcode ck_set_text(CURL *easy, CURLoption option, const char *value) {
    return curl_easy_setopt(easy, option, value);
}

static inline CURLcode ck_set_pointer(CURL *easy, CURLoption option, void *value) {
    return curl_easy_setopt(easy, option, value);
}

static inline CURLcode ck_set_headers(CURL *easy, struct curl_slist *first) {
    return curl_easy_setopt(easy, CURLOPT_HTTPHEADER, first);
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

static inline CURLcode ck_set_receiver(CURL *easy, CURLoption option, curl_write_callback receiver) {
    return curl_easy_setopt(easy, option, receiver);
}

static inline CURLcode ck_set_before_sending(CURL *easy, curl_prereq_callback callback) {
    return curl_easy_setopt(easy, CURLOPT_PREREQFUNCTION, callback);
}

static inline CURLcode ck_set_socket_opened(CURL *easy, curl_sockopt_callback callback) {
    return curl_easy_setopt(easy, CURLOPT_SOCKOPTFUNCTION, callback);
}

static inline CURLcode ck_set_socket_closes(CURL *easy, curl_closesocket_callback callback) {
    return curl_easy_setopt(easy, CURLOPT_CLOSESOCKETFUNCTION, callback);
}

static inline CURLcode ck_set_trace(CURL *easy, curl_debug_callback callback) {
    return curl_easy_setopt(easy, CURLOPT_DEBUGFUNCTION, callback);
}

static inline CURLcode ck_get_pointer(CURL *easy, CURLINFO info, void **value) {
    return curl_easy_getinfo(easy, info, value);
}

static inline CURLMcode ck_multi_set_long(CURLM *multi, CURLMoption option, long value) {
    return curl_multi_setopt(multi, option, value);
}

static inline CURLcode ck_global_init(void) { return curl_global_init(CURL_GLOBAL_DEFAULT); }

/* Whether the connection that the transfer is about to use has agreed on HTTP/2 by ALPN: libcurl itself would go on in
   HTTP/1.1, and does not tell which it is before the answer. */
static inline int ck_has_agreed_on_h2(CURL *easy) {
    struct curl_tlssessioninfo *session = NULL;
    const unsigned char *name = NULL;
    unsigned int length = 0;
    if (curl_easy_getinfo(easy, CURLINFO_TLS_SSL_PTR, &session) != CURLE_OK || !session) return 0;
    if (session->backend != CURLSSLBACKEND_OPENSSL || !session->internals) return 0;
    SSL_get0_alpn_selected((const SSL *)session->internals, &name, &length);
    return length == 2 && name[0] == 'h' && name[1] == '2';
}
