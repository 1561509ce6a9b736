/* SPDX-License-Identifier: Apache-2.0 */
/* The header of a stripe: all of it is in chunks/frame.py. Pure. */
#ifndef LMCR_HEADER_H
#define LMCR_HEADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where fields are that the movers use. */
#define HEADER_BYTES 640
#define STORE_ID_AT 8
#define STORE_ID_BYTES 16
#define FLAGS_AT 28
#define SEALED 1 /* in the first byte of the flags: the payload is encrypted */
#define PAYLOAD_CHECKSUM_AT 56
#define CREATED_AT 160
#define OWN_CHECKSUM_AT 168
#define CHECKSUM_BYTES 8
#define STORED_FORM_AT 176 /* codec u8, element bytes u8, zeros, stored bytes u64 */
#define PACKED 1           /* the codec; 0: plain */
#define ELEMENT_BYTES_AT 177
#define STORED_BYTES_AT 184
#define PLAIN_CHECKSUM_AT 192 /* and the tenant */
#define METADATA_AT 208
#define SEAL_AT 592
#define SEAL_BYTES 48

/* Write the checksums of payload and header into the header. Short payloads need another algorithm,
 * which only the caller has: it adds theirs and verifies them after a load. */
void header_add_checksums(uint8_t *header, const uint8_t *payload, size_t nbytes);

/* Whether it is the expected one: its own checksum, and every field known in advance. stored: the
 * bytes behind it; a payload of fewer than `nbytes` must be packed, and is never short. */
bool header_is_expected(const uint8_t *header, const uint8_t *expected, size_t stored,
                        size_t nbytes);

/* Whether it names the checksum of this payload, which was unpacked; true if it names none. */
bool header_is_of_plain(const uint8_t *header, const uint8_t *payload, size_t nbytes);

#endif
