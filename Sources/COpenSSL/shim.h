#pragma once
#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/ecdsa.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/objects.h>
#include <openssl/pem.h>
#include <openssl/pkcs12.h>
#include <openssl/ssl.h> // Only the tests call it, and link libssl.
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <string.h>

// What Swift cannot import: macros that contain a cast or a type, and a callback for OpenSSL.

// Whether an error says that no provider has the algorithm, such as RC2-40. DECODER's "unsupported" means that it does not know
// the input.
static inline int tk_is_unsupported_algorithm(unsigned long error) {
    return ERR_GET_LIB(error) == ERR_LIB_EVP && ERR_GET_REASON(error) == ERR_R_UNSUPPORTED;
}

// A password for OpenSSL's PEM readers, or NULL for none. Without a callback they would prompt at the terminal.
struct tk_password {
    const char *bytes;
    int count;
    int was_asked;
};

static inline int tk_give_password(char *buffer, int size, int is_writing, void *user) {
    struct tk_password *password = (struct tk_password *)user;
    (void)is_writing;
    password->was_asked = 1;
    if (password->bytes == NULL || password->count > size) return -1;
    memcpy(buffer, password->bytes, (size_t)password->count);
    return password->count;
}

// The first private key of a PEM text, or NULL.
static inline EVP_PKEY *tk_private_key(const void *pem, int count, struct tk_password *password) {
    BIO *bio = BIO_new_mem_buf(pem, count);
    if (bio == NULL) return NULL;
    EVP_PKEY *key = PEM_read_bio_PrivateKey(bio, NULL, tk_give_password, password);
    BIO_free(bio);
    return key;
}

// The functions of stacks are macros, one for each type.
static inline int tk_certificate_count(const STACK_OF(X509) *stack) {
    return stack == NULL ? 0 : sk_X509_num(stack);
}

static inline X509 *tk_take_certificate(STACK_OF(X509) *stack) {
    return sk_X509_shift(stack);
}

static inline void tk_free_certificates(STACK_OF(X509) *stack) {
    sk_X509_pop_free(stack, X509_free);
}
