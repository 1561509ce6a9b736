/* SPDX-License-Identifier: Apache-2.0 */
/* Virtual memory management: allocations that are mapped in pieces, and shared by descriptors. */
#include "stub.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)
enum { BY_DESCRIPTOR = 1, BY_FABRIC = 8 };

typedef struct Handle {
    int fd, device;
    size_t size;
    unsigned handle_types;
    int references; /* Of the program. */
    int mappings;
    struct Handle *next;
} Handle;

typedef struct Reservation {
    Address base;
    size_t size;
    struct Reservation *next;
} Reservation;

/* All under the lock of memory. */
static Handle *handles;
static Reservation *reservations;

typedef struct {
    unsigned type, handle_types, location_type;
    int location;
    void *metadata;
    uint64_t flags;
} Properties;

typedef struct {
    unsigned location_type;
    int location;
    unsigned flags;
} Access;

enum { PINNED_TYPE = 1, ON_DEVICE = 1, ACCESS_READ = 1, ACCESS_WRITE = 3 };

static bool is_whole(uint64_t number)
{
    return number && number % GRANULARITY == 0;
}

static void lock(void)
{
    pthread_rwlock_wrlock(&stub_memory_lock);
}

static Result unlock(Result result)
{
    pthread_rwlock_unlock(&stub_memory_lock);
    return result;
}

static Handle *add_handle(Handle handle)
{
    Handle *added = malloc(sizeof *added);
    *added = handle;
    added->next = handles;
    handles = added;
    COUNT(handles)++;
    return added;
}

static Handle *handle_at(Address number)
{
    Handle *handle = handles;
    while (handle != NULL && (Address)handle != number) {
        handle = handle->next;
    }
    return handle != NULL && handle->references ? handle : NULL;
}

/* Frees it when neither the program nor a mapping has it. */
static void drop_handle(Handle *handle)
{
    if (handle->references || handle->mappings) {
        return;
    }
    Handle **at = &handles;
    while (*at != handle) {
        at = &(*at)->next;
    }
    *at = handle->next;
    close(handle->fd);
    free(handle);
    COUNT(handles)--;
}

EXPORT Result cuMemCreate(Address *handle, size_t size, const Properties *properties,
    uint64_t flags)
{
    ENTER_WITHOUT_CONTEXT(cuMemCreate);
    if (!is_whole(size) || flags || properties->type != PINNED_TYPE ||
        properties->location_type != ON_DEVICE ||
        properties->handle_types & ~(unsigned)(BY_DESCRIPTOR | BY_FABRIC)) {
        return INVALID_VALUE;
    }
    if (properties->handle_types & BY_FABRIC && !SETTING(fabric)) {
        return NOT_SUPPORTED;
    }
    if (properties->location < 0 || !stub_is_ordinal(properties->location)) {
        return INVALID_DEVICE;
    }
    const int fd = stub_new_memory(size, properties->location,
        properties->handle_types & BY_DESCRIPTOR);
    void *at = MAP_FAILED;
    if (fd >= 0) {
        at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (at == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    memset(at, FRESH_BYTE, size);
    munmap(at, size);
    lock();
    *handle = (Address)add_handle((Handle){.fd = fd, .device = properties->location, .size = size,
        .handle_types = properties->handle_types, .references = 1});
    return unlock(OK);
}

EXPORT Result cuMemRelease(Address number)
{
    ENTER_WITHOUT_CONTEXT(cuMemRelease);
    lock();
    Handle *handle = handle_at(number);
    if (handle == NULL) {
        return unlock(stub_refuse(INVALID_VALUE, "%#lx is no handle", number));
    }
    handle->references--;
    drop_handle(handle);
    return unlock(OK);
}

EXPORT Result cuMemRetainAllocationHandle(Address *number, void *address)
{
    ENTER_WITHOUT_CONTEXT(cuMemRetainAllocationHandle);
    lock();
    Region *region = stub_region_of((Address)address);
    if (region == NULL || region->kind != MAPPED) {
        return unlock(INVALID_VALUE);
    }
    Handle *handle = region->owner;
    handle->references++;
    *number = (Address)handle;
    return unlock(OK);
}

EXPORT Result cuMemGetAllocationPropertiesFromHandle(Properties *properties, Address number)
{
    ENTER_WITHOUT_CONTEXT(cuMemGetAllocationPropertiesFromHandle);
    lock();
    const Handle *handle = handle_at(number);
    if (handle != NULL) {
        *properties = (Properties){.type = PINNED_TYPE, .handle_types = handle->handle_types,
            .location_type = ON_DEVICE, .location = handle->device};
    }
    return unlock(handle != NULL ? OK : INVALID_VALUE);
}

EXPORT Result cuMemExportToShareableHandle(int *fd, Address number, int type, uint64_t flags)
{
    ENTER_WITHOUT_CONTEXT(cuMemExportToShareableHandle);
    lock();
    const Handle *handle = handle_at(number);
    if (handle == NULL || type != BY_DESCRIPTOR || flags || !(handle->handle_types & BY_DESCRIPTOR)) {
        return unlock(INVALID_VALUE);
    }
    *fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    return unlock(*fd >= 0 ? OK : OPERATING_SYSTEM);
}

EXPORT Result cuMemImportFromShareableHandle(Address *number, void *descriptor, int type)
{
    ENTER_WITHOUT_CONTEXT(cuMemImportFromShareableHandle);
    Trailer *trailer = type == BY_DESCRIPTOR ? stub_trailer((int)(intptr_t)descriptor) : NULL;
    if (trailer == NULL) {
        return INVALID_VALUE;
    }
    const bool exportable = trailer->exportable;
    const size_t size = trailer->size;
    const int device = stub_device_of(trailer->uuid);
    munmap(trailer, TRAILER_BYTES);
    if (!exportable || device < 0) {
        return exportable ? INVALID_DEVICE : INVALID_VALUE;
    }
    const int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
        return OPERATING_SYSTEM;
    }
    lock();
    *number = (Address)add_handle((Handle){
        .fd = fd, .device = device, .size = size, .handle_types = BY_DESCRIPTOR,
        .references = 1});
    return unlock(OK);
}

EXPORT Result cuMemAddressReserve(Address *address, size_t size, size_t alignment, Address hint,
    uint64_t flags)
{
    ENTER_WITHOUT_CONTEXT(cuMemAddressReserve);
    (void)hint;
    if (!is_whole(size) || alignment & (alignment - 1) || flags) {
        return INVALID_VALUE;
    }
    const size_t aligned = alignment > GRANULARITY ? alignment : GRANULARITY;
    void *at = mmap(NULL, size + aligned, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1, 0);
    if (at == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    const Address start = (Address)at, base = (start + aligned - 1) & ~(aligned - 1);
    if (base > start) {
        munmap(at, base - start);
    }
    if (base - start < aligned) {
        munmap((void *)(base + size), aligned - (base - start));
    }
    Reservation *reservation = malloc(sizeof *reservation);
    lock();
    *reservation = (Reservation){.base = base, .size = size, .next = reservations};
    reservations = reservation;
    COUNT(reservations)++;
    *address = base;
    return unlock(OK);
}

EXPORT Result cuMemAddressFree(Address address, size_t size)
{
    ENTER_WITHOUT_CONTEXT(cuMemAddressFree);
    lock();
    Reservation **at = &reservations;
    while (*at != NULL && ((*at)->base != address || (*at)->size != size)) {
        at = &(*at)->next;
    }
    if (*at == NULL || stub_overlap(address, size) != NULL) {
        return unlock(stub_refuse(INVALID_VALUE, "no such reservation, or it has mappings"));
    }
    Reservation *gone = *at;
    *at = gone->next;
    free(gone);
    munmap((void *)address, size);
    COUNT(reservations)--;
    return unlock(OK);
}

static bool is_reserved(Address address, size_t size)
{
    for (const Reservation *each = reservations; each != NULL; each = each->next) {
        if (address >= each->base && address + size <= each->base + each->size) {
            return true;
        }
    }
    return false;
}

EXPORT Result cuMemMap(Address address, size_t size, size_t offset, Address number, uint64_t flags)
{
    ENTER_WITHOUT_CONTEXT(cuMemMap);
    lock();
    Handle *handle = handle_at(number);
    if (handle == NULL || flags || !is_whole(size) || offset % GRANULARITY ||
        address % GRANULARITY || offset + size > handle->size) {
        return unlock(INVALID_VALUE);
    }
    if (!is_reserved(address, size) || stub_overlap(address, size) != NULL) {
        return unlock(stub_refuse(INVALID_VALUE, "%#lx is not reserved, or is mapped", address));
    }
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd,
        (off_t)offset);
    if (at == MAP_FAILED) {
        return unlock(OUT_OF_MEMORY);
    }
    handle->mappings++;
    stub_add_region((Region){.base = address, .size = size, .kind = MAPPED,
        .device = handle->device, .fd = -1, .owner = handle});
    COUNT(mappings)++;
    return unlock(OK);
}

/* Whether whole mappings, one after the other, make up a range. */
static bool is_all_mapped(Address address, size_t size)
{
    const Address end = address + size;
    while (address < end) {
        const Region *region = stub_region_at(address, MAPPED);
        if (region == NULL) {
            return false;
        }
        address += region->size;
    }
    return address == end;
}

EXPORT Result cuMemUnmap(Address address, size_t size)
{
    ENTER_WITHOUT_CONTEXT(cuMemUnmap);
    lock();
    if (!size || !is_all_mapped(address, size)) {
        return unlock(stub_refuse(INVALID_VALUE, "%lu bytes at %#lx: not mapped, or a part of a "
            "mapping", size, address));
    }
    for (const Address end = address + size; address < end;) {
        Region *region = stub_region_at(address, MAPPED);
        Handle *handle = region->owner;
        mmap((void *)address, region->size, PROT_NONE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        address += region->size;
        stub_remove_region(region);
        handle->mappings--;
        drop_handle(handle);
        COUNT(mappings)--;
    }
    return unlock(OK);
}

EXPORT Result cuMemSetAccess(Address address, size_t size, const Access *access, size_t count)
{
    ENTER_WITHOUT_CONTEXT(cuMemSetAccess);
    if (count != 1 || access->location_type != ON_DEVICE ||
        (access->flags && access->flags != ACCESS_READ && access->flags != ACCESS_WRITE)) {
        return stub_refuse(INVALID_VALUE, "the stub sets the access of one GPU");
    }
    lock();
    if (!size || !is_all_mapped(address, size)) {
        return unlock(stub_refuse(INVALID_VALUE, "%lu bytes at %#lx: not mapped", size, address));
    }
    for (const Address end = address + size; address < end;) {
        Region *region = stub_region_at(address, MAPPED);
        if (region->device != access->location) {
            return unlock(stub_refuse(INVALID_DEVICE, "access by another GPU"));
        }
        region->readable = access->flags & ACCESS_READ;
        region->writable = access->flags == ACCESS_WRITE;
        mprotect((void *)address, region->size, (region->readable ? PROT_READ : 0) |
            (region->writable ? PROT_WRITE : 0));
        address += region->size;
    }
    return unlock(OK);
}

void stub_forget_handles(void)
{
    for (; reservations != NULL;) {
        Reservation *next = reservations->next;
        munmap((void *)reservations->base, reservations->size);
        free(reservations);
        reservations = next;
    }
    for (; handles != NULL;) {
        Handle *next = handles->next;
        close(handles->fd);
        free(handles);
        handles = next;
    }
}
