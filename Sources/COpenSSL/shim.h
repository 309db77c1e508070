#pragma once
#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/core_names.h>
#include <openssl/ecdsa.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/objects.h>
#include <openssl/pem.h>
#include <openssl/pkcs12.h>
#include <openssl/rand.h>
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

static inline EVP_PKEY *tk_key_of_bag(const PKCS12_SAFEBAG *bag, const char *password) {
    if (PKCS12_SAFEBAG_get_nid(bag) == NID_keyBag) return EVP_PKCS82PKEY(PKCS12_SAFEBAG_get0_p8inf(bag));
    PKCS8_PRIV_KEY_INFO *info = PKCS12_decrypt_skey(bag, password, -1);
    EVP_PKEY *key = info == NULL ? NULL : EVP_PKCS82PKEY(info);
    PKCS8_PRIV_KEY_INFO_free(info);
    return key;
}

// The private key with this number, counted from 0 in the order of a PKCS#12 file; NULL if there are fewer, or if the file cannot be decrypted.
static inline EVP_PKEY *tk_archived_key(PKCS12 *archive, const char *password, int number) {
    EVP_PKEY *key = NULL;
    STACK_OF(PKCS7) *safes = PKCS12_unpack_authsafes(archive);
    for (int i = 0; safes != NULL && number >= 0 && i < sk_PKCS7_num(safes); i++) {
        PKCS7 *safe = sk_PKCS7_value(safes, i);
        STACK_OF(PKCS12_SAFEBAG) *bags = NULL;
        if (PKCS7_type_is_data(safe)) bags = PKCS12_unpack_p7data(safe);
        else if (PKCS7_type_is_encrypted(safe)) bags = PKCS12_unpack_p7encdata(safe, password, -1);
        for (int j = 0; bags != NULL && number >= 0 && j < sk_PKCS12_SAFEBAG_num(bags); j++) {
            const PKCS12_SAFEBAG *bag = sk_PKCS12_SAFEBAG_value(bags, j);
            int kind = PKCS12_SAFEBAG_get_nid(bag);
            if (kind != NID_keyBag && kind != NID_pkcs8ShroudedKeyBag) continue;
            if (number == 0) key = tk_key_of_bag(bag, password);
            number -= 1;
        }
        sk_PKCS12_SAFEBAG_pop_free(bags, PKCS12_SAFEBAG_free);
    }
    sk_PKCS7_pop_free(safes, PKCS7_free);
    return key;
}
