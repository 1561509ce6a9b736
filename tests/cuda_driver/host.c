/* SPDX-License-Identifier: Apache-2.0 */
/* Page-locked memory of the host. */
#include "stub.h"

#include <string.h>
#include <sys/mman.h>

/* Whether all pages of a range belong to the process. */
bool stub_is_in_process(Address address, size_t size)
{
    const Address first = address & ~(PAGE_BYTES - 1), end = stub_whole_pages(address + size);
    unsigned char resident[1024];
    for (Address at = first; at < end; at += sizeof resident * PAGE_BYTES) {
        const Address here = end - at < sizeof resident * PAGE_BYTES
            ? end - at : sizeof resident * PAGE_BYTES;
        if (mincore((void *)at, here, resident)) {
            return false;
        }
    }
    return true;
}

EXPORT Result cuMemHostAlloc(void **address, size_t size, unsigned flags)
{
    ENTER(cuMemHostAlloc);
    if (!size || flags & ~7u) {
        return INVALID_VALUE;
    }
    void *at = mmap(NULL, stub_whole_pages(size), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    memset(at, FRESH_BYTE, size);
    pthread_rwlock_wrlock(&stub_memory_lock);
    stub_add_region((Region){.base = (Address)at, .size = size, .kind = PINNED,
        .device = stub_context()->device, .everywhere = true, .device_map = true,
        .readable = true, .writable = true, .fd = -1});
    pthread_rwlock_unlock(&stub_memory_lock);
    COUNT(pinned)++;
    *address = at;
    return OK;
}

EXPORT Result cuMemFreeHost(void *address)
{
    ENTER(cuMemFreeHost);
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region *region = stub_region_at((Address)address, PINNED);
    if (region != NULL) {
        memset(address, FREED_BYTE, region->size);
        munmap(address, stub_whole_pages(region->size));
        stub_remove_region(region);
        COUNT(pinned)--;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return region != NULL ? OK : INVALID_VALUE;
}

EXPORT Result cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    ENTER(cuMemHostRegister_v2);
    const Address base = (Address)address, end = base + size;
    const Address first_page = base & ~(PAGE_BYTES - 1), last_page = stub_whole_pages(end);
    if (!base || !size || flags & ~3u) {
        return INVALID_VALUE;
    }
    if (!stub_is_in_process(base, size)) {
        return stub_refuse(INVALID_VALUE, "%#lx to %#lx is not all mapped", base, end);
    }
    if (SETTING(pin_most_mib) && size > (size_t)SETTING(pin_most_mib) << 20) {
        return OUT_OF_MEMORY;
    }
    stub_nap((uint64_t)SETTING(pin_us_per_mib) * (size >> 20));
    pthread_rwlock_wrlock(&stub_memory_lock);
    Result result = OK;
    const Region *other = stub_overlap(base, size);
    if (other != NULL) {
        result = stub_is_device(other) ? INVALID_VALUE : ALREADY_REGISTERED;
    } else if (stub_overlap(first_page, last_page - first_page) != NULL) {
        result = stub_refuse(ALREADY_REGISTERED, "it shares a page with another registration");
    }
    if (!result) {
        stub_add_region((Region){.base = base, .size = size, .kind = REGISTERED,
            .device = stub_context()->device, .everywhere = flags & 1, .device_map = flags & 2,
            .readable = true, .writable = true, .fd = -1});
        COUNT(pinned)++;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return result;
}

EXPORT Result cuMemHostUnregister(void *address)
{
    ENTER(cuMemHostUnregister);
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region *region = stub_region_at((Address)address, REGISTERED);
    if (region != NULL) {
        stub_remove_region(region);
        COUNT(pinned)--;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return region != NULL ? OK : NOT_REGISTERED;
}

EXPORT Result cuMemHostGetDevicePointer_v2(Address *found, void *host, unsigned flags)
{
    ENTER(cuMemHostGetDevicePointer_v2);
    pthread_rwlock_rdlock(&stub_memory_lock);
    const Region *region = stub_region_of((Address)host);
    const bool good = !flags && region != NULL && !stub_is_device(region) && region->device_map;
    if (good) {
        const bool moved = region->kind == REGISTERED && SETTING(distinct_pinned);
        *found = (Address)host + (moved ? DISTINCT_OFFSET : 0);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return good ? OK : INVALID_VALUE;
}
