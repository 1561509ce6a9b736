/* SPDX-License-Identifier: Apache-2.0 */
/* Payloads in fewer bytes, bit for bit; see packing.c. Independent of Python. */
#ifndef LMCR_PACKING_H
#define LMCR_PACKING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Pack elements of 1, 2 or 4 bytes into out[0..room), which overlaps nothing. The bytes used; 0 if
 * that would save less than a 32nd, or need more room. */
size_t pack(const uint8_t *plain, size_t nbytes, size_t element_bytes, uint8_t *out, size_t room);

/* Bring plain[0..nbytes) back. False if what is stored is not a packed form of so many bytes; then
 * `plain` is in no defined state. */
bool unpack(const uint8_t *stored, size_t stored_bytes, size_t element_bytes, uint8_t *plain,
            size_t nbytes);

#endif
