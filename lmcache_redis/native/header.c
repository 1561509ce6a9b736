/* SPDX-License-Identifier: Apache-2.0 */
#include "header.h"
#include "xxh3.h"

#include <string.h>

static uint64_t xxh3_of(const uint8_t *data, size_t nbytes)
{
    Xxh3 hash;
    xxh3_begin(&hash);
    return xxh3_end(&hash, data, nbytes);
}

void header_add_checksums(uint8_t *header, const uint8_t *payload, size_t nbytes)
{
    const uint64_t of_payload = xxh3_of(payload, nbytes);
    memcpy(header + PAYLOAD_CHECKSUM_AT, &of_payload, CHECKSUM_BYTES);
    memset(header + OWN_CHECKSUM_AT, 0, CHECKSUM_BYTES);
    const uint64_t own = xxh3_of(header, HEADER_BYTES);
    memcpy(header + OWN_CHECKSUM_AT, &own, CHECKSUM_BYTES);
}

bool header_is_expected(const uint8_t *header, const uint8_t *expected, size_t stored,
                        size_t nbytes)
{
    uint8_t masked[HEADER_BYTES];
    uint64_t own;
    memcpy(masked, header, HEADER_BYTES);
    memcpy(&own, masked + OWN_CHECKSUM_AT, CHECKSUM_BYTES);
    memset(masked + OWN_CHECKSUM_AT, 0, CHECKSUM_BYTES);
    if (own != xxh3_of(masked, HEADER_BYTES)) {
        return false;
    }
    memset(masked + STORE_ID_AT, 0, STORE_ID_BYTES);
    memset(masked + PAYLOAD_CHECKSUM_AT, 0, CHECKSUM_BYTES);
    memset(masked + CREATED_AT, 0, CHECKSUM_BYTES);
    memset(masked + PLAIN_CHECKSUM_AT, 0, METADATA_AT - PLAIN_CHECKSUM_AT);
    if (expected[FLAGS_AT] & SEALED) {
        memset(masked + SEAL_AT, 0, SEAL_BYTES);
    }
    if (stored < nbytes) {
        const uint8_t element_bytes = masked[ELEMENT_BYTES_AT];
        uint8_t form[PLAIN_CHECKSUM_AT - STORED_FORM_AT] = {PACKED, element_bytes};
        const uint64_t stored_bytes = stored;
        memcpy(form + STORED_BYTES_AT - STORED_FORM_AT, &stored_bytes, sizeof stored_bytes);
        if (stored <= XXH3_SHORT_BYTES ||
            (element_bytes != 1 && element_bytes != 2 && element_bytes != 4) ||
            memcmp(masked + STORED_FORM_AT, form, sizeof form)) {
            return false;
        }
        memcpy(masked + STORED_FORM_AT, expected + STORED_FORM_AT, sizeof form);
    }
    return memcmp(masked, expected, HEADER_BYTES) == 0;
}

bool header_is_of_plain(const uint8_t *header, const uint8_t *payload, size_t nbytes)
{
    uint64_t checksum;
    memcpy(&checksum, header + PLAIN_CHECKSUM_AT, CHECKSUM_BYTES);
    return !checksum || checksum == xxh3_of(payload, nbytes);
}
