/* SPDX-License-Identifier: Apache-2.0 */
/* The regions of memory that a GPU can reach, and allocations. */
#include "stub.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MEMORY_BYTES ((size_t)4 << 30) /* Of each GPU, for each process. */

pthread_rwlock_t stub_memory_lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static Region *regions;

size_t stub_whole_pages(size_t size)
{
    return (size + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
}

Region *stub_add_region(Region region)
{
    Region *added = malloc(sizeof *added);
    *added = region;
    added->next = regions;
    regions = added;
    return added;
}

void stub_remove_region(Region *region)
{
    for (Region **at = &regions; *at != NULL; at = &(*at)->next) {
        if (*at == region) {
            *at = region->next;
            free(region);
            return;
        }
    }
}

Region *stub_region_at(Address base, Kind kind)
{
    for (Region *region = regions; region != NULL; region = region->next) {
        if (region->base == base && region->kind == kind) {
            return region;
        }
    }
    return NULL;
}

Region *stub_region_of(Address address)
{
    for (Region *region = regions; region != NULL; region = region->next) {
        if (address - region->base < region->size) {
            return region;
        }
    }
    return NULL;
}

Region *stub_opened(ino_t inode)
{
    for (Region *region = regions; region != NULL; region = region->next) {
        if (region->kind == OPENED && region->inode == inode) {
            return region;
        }
    }
    return NULL;
}

Region *stub_overlap(Address address, size_t size)
{
    for (Region *region = regions; region != NULL; region = region->next) {
        if (address < region->base + region->size && region->base < address + size) {
            return region;
        }
    }
    return NULL;
}

bool stub_is_device(const Region *region)
{
    return region->kind == ALLOCATED || region->kind == OPENED || region->kind == MAPPED;
}

/* Whether a region, or pieces that are mapped one after the other, cover a range. */
static bool covers(const Region *region, Address address, size_t size, bool to_write)
{
    while (region != NULL && (to_write ? region->writable : region->readable)) {
        const size_t left = region->base + region->size - address;
        if (size <= left) {
            return true;
        }
        if (region->kind != MAPPED) {
            return false;
        }
        address += left;
        size -= left;
        region = stub_region_of(address);
        if (region != NULL && region->kind != MAPPED) {
            return false;
        }
    }
    return false;
}

char *stub_reach_near(Address address, size_t size, bool to_write, const Region **near)
{
    if (*near != NULL && address - (*near)->base < (*near)->size) {
        const bool good = covers(*near, address, size, to_write);
        return good ? (char *)address : NULL;
    }
    char *found = stub_reach(address, size, to_write);
    const Region *region = stub_region_of(address);
    *near = region != NULL && region->kind != REGISTERED ? region : NULL;
    return found;
}

char *stub_reach(Address address, size_t size, bool to_write)
{
    const bool is_alias = address >= DISTINCT_OFFSET;
    const Address host = is_alias ? address - DISTINCT_OFFSET : address;
    const Region *region = stub_region_of(host);
    if (region == NULL) {
        return NULL;
    }
    const bool has_alias = region->kind == REGISTERED && SETTING(distinct_pinned);
    if (is_alias != has_alias || (region->kind == REGISTERED && !region->device_map)) {
        return NULL;
    }
    return covers(region, host, size, to_write) ? (char *)host : NULL;
}

char *stub_reach_for_copy(Address address, size_t size, bool to_write)
{
    const Address host = address >= DISTINCT_OFFSET ? address - DISTINCT_OFFSET : address;
    const Region *region = stub_region_of(host);
    if (address >= DISTINCT_OFFSET && (region == NULL || region->kind != REGISTERED)) {
        return NULL;
    }
    return covers(region, host, size, to_write) ? (char *)host : NULL;
}

size_t stub_used(int device)
{
    size_t used = 0;
    pthread_rwlock_rdlock(&stub_memory_lock);
    for (const Region *region = regions; region != NULL; region = region->next) {
        used += region->device == device && stub_is_device(region) ? region->size : 0;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return used;
}

/* A memfd of `size` bytes and a trailer, or -1. */
int stub_new_memory(size_t size, int device, bool exportable)
{
    const int fd = memfd_create("cuda-stub", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(size + TRAILER_BYTES))) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    Trailer trailer = {.magic = TRAILER_MAGIC, .size = size, .exportable = exportable};
    memcpy(trailer.uuid, stub_uuid(device), 16);
    if (pwrite(fd, &trailer, sizeof trailer, (off_t)size) != sizeof trailer) {
        close(fd);
        return -1;
    }
    return fd;
}

Trailer *stub_trailer(int fd)
{
    struct stat found;
    if (fstat(fd, &found) || found.st_size < TRAILER_BYTES) {
        return NULL;
    }
    const off_t at = found.st_size - TRAILER_BYTES;
    void *mapped = mmap(NULL, TRAILER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);
    if (mapped == MAP_FAILED) {
        return NULL;
    }
    Trailer *trailer = mapped;
    if (trailer->magic != TRAILER_MAGIC || trailer->size != (uint64_t)at) {
        munmap(mapped, TRAILER_BYTES);
        return NULL;
    }
    return trailer;
}

/* New memory of a GPU, mapped: a region without `.size`, or one without `.base`. */
static Region map_memory(size_t size, int device)
{
    const int fd = stub_new_memory(size, device, false);
    void *at = MAP_FAILED;
    if (fd >= 0) {
        at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (at == MAP_FAILED) {
        return (Region){0};
    }
    memset(at, FRESH_BYTE, size);
    struct stat found;
    fstat(fd, &found);
    return (Region){.base = (Address)at, .kind = ALLOCATED, .device = device, .readable = true,
        .writable = true, .fd = fd, .inode = found.st_ino};
}

/* Memory of which small allocations are parts. None is at its beginning, where a handle of any of
 * them leads: the manual does not say to which of its bytes. */
typedef struct Block {
    Region memory;
    size_t used;
    int parts;
    struct Block *next;
} Block;

static Block *blocks;

/* A part of a block: not used before, also if others have been freed. */
static Region part_of_block(size_t size, int device)
{
    const size_t room = (size + ALIGNED_BYTES - 1) & ~(size_t)(ALIGNED_BYTES - 1);
    Block *block = blocks;
    while (block != NULL &&
           (block->memory.device != device || block->used + room > BLOCK_BYTES)) {
        block = block->next;
    }
    if (block == NULL) {
        const Region memory = map_memory(BLOCK_BYTES, device);
        if (!memory.base) {
            return memory;
        }
        block = malloc(sizeof *block);
        *block = (Block){.memory = memory, .used = ALIGNED_BYTES, .next = blocks};
        blocks = block;
    }
    Region part = block->memory;
    part.base += block->used;
    part.owner = block;
    block->used += room;
    block->parts++;
    return part;
}

/* Gives the memory of an allocation back; that of a block with its last part. */
static void unmap_memory(const Region *region)
{
    Block *block = region->owner;
    if (block == NULL) {
        munmap((void *)region->base, stub_whole_pages(region->size));
        close(region->fd);
        return;
    }
    if (--block->parts) {
        return;
    }
    Block **at = &blocks;
    while (*at != block) {
        at = &(*at)->next;
    }
    *at = block->next;
    munmap((void *)block->memory.base, BLOCK_BYTES);
    close(block->memory.fd);
    free(block);
}

EXPORT Result cuMemAlloc_v2(Address *address, size_t size)
{
    ENTER(cuMemAlloc_v2);
    if (!size) {
        return INVALID_VALUE;
    }
    const int device = stub_context()->device;
    if (stub_used(device) + size > MEMORY_BYTES) {
        return OUT_OF_MEMORY;
    }
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region made = size + ALIGNED_BYTES <= BLOCK_BYTES
        ? part_of_block(size, device) : map_memory(stub_whole_pages(size), device);
    if (made.base) {
        made.size = size;
        stub_add_region(made);
        COUNT(allocations)++;
        *address = made.base;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return made.base ? OK : OUT_OF_MEMORY;
}

EXPORT Result cuMemFree_v2(Address address)
{
    ENTER(cuMemFree_v2);
    pthread_rwlock_rdlock(&stub_memory_lock);
    const Region *found = stub_region_at(address, ALLOCATED);
    const Region held = found != NULL ? *found : (Region){0};
    pthread_rwlock_unlock(&stub_memory_lock);
    if (found == NULL) {
        return stub_refuse(INVALID_VALUE, "%#lx is no allocation of cuMemAlloc", address);
    }
    const int opener = held.exported ? stub_opener_of(held.fd) : 0;
    if (opener) {
        return stub_refuse(INVALID_VALUE, "process %d has the allocation open", opener);
    }
    const Result result = stub_wait_for_device(held.device);
    if (result) {
        return result;
    }
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region *region = stub_region_at(address, ALLOCATED);
    if (region != NULL) {
        stub_remove_region(region);
        memset((void *)address, FREED_BYTE, held.size);
        unmap_memory(&held);
        COUNT(allocations)--;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return region != NULL ? OK : stub_refuse(INVALID_VALUE, "%#lx is freed twice", address);
}

EXPORT Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER(cuMemGetInfo_v2);
    *total = MEMORY_BYTES;
    const size_t used = stub_used(stub_context()->device);
    *free_bytes = used < *total ? *total - used : 0;
    return OK;
}

EXPORT Result cuMemGetAddressRange_v2(Address *base, size_t *size, Address address)
{
    ENTER(cuMemGetAddressRange_v2);
    pthread_rwlock_rdlock(&stub_memory_lock);
    const Region *region = stub_region_of(address);
    const bool found = region != NULL && stub_is_device(region);
    if (found && base != NULL) {
        *base = region->base;
    }
    if (found && size != NULL) {
        *size = region->size;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return found ? OK : NOT_FOUND;
}

void stub_forget_memory(int device)
{
    pthread_rwlock_wrlock(&stub_memory_lock);
    for (Region *region = regions, *next; region != NULL; region = next) {
        next = region->next;
        if (device >= 0 && (region->device != device || region->kind == MAPPED)) {
            continue; /* Mappings belong to the process. */
        }
        COUNT(allocations) -= region->kind == ALLOCATED;
        COUNT(opened) -= region->kind == OPENED;
        COUNT(pinned) -= region->kind == PINNED || region->kind == REGISTERED;
        if (region->kind == OPENED) {
            stub_note_opener(region->fd, getpid(), 0);
        }
        if (region->kind == ALLOCATED) {
            unmap_memory(region);
        } else if (region->kind != MAPPED && region->kind != REGISTERED) {
            munmap((void *)region->base, stub_whole_pages(region->size));
        }
        if (region->kind != ALLOCATED && region->fd >= 0) {
            close(region->fd);
        }
        stub_remove_region(region);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
}
