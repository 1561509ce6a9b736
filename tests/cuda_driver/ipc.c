/* SPDX-License-Identifier: Apache-2.0 */
/* Handles of allocations, by which another process maps them. */
#include "stub.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x63706975u

typedef struct {
    char reserved[64];
} Handle;

typedef struct {
    uint32_t magic;
    int pid, fd;
    uint64_t inode;
    uint64_t size; /* Of the allocation, which may end within a page; of its block if it is small. */
    uint8_t uuid[16];
} Contents;

_Static_assert(sizeof(Contents) <= sizeof(Handle), "");

EXPORT Result cuIpcGetMemHandle(Handle *handle, Address address)
{
    ENTER(cuIpcGetMemHandle);
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region *region = stub_region_of(address);
    const bool good = region != NULL && region->kind == ALLOCATED;
    if (good) {
        region->exported = true;
        Contents contents = {.magic = MAGIC, .pid = getpid(), .fd = region->fd,
            .inode = region->inode, .size = region->owner != NULL ? BLOCK_BYTES : region->size};
        memcpy(contents.uuid, stub_uuid(region->device), 16);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &contents, sizeof contents);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return good ? OK : INVALID_VALUE; /* So for memory of cuMemMap or of another process. */
}

/* Notes in the memory that this process has it open, or no longer. */
void stub_note_opener(int fd, int before, int after)
{
    Trailer *trailer = stub_trailer(fd);
    for (size_t i = 0; trailer != NULL && i < sizeof trailer->openers / sizeof(int); i++) {
        int expected = before;
        if (atomic_compare_exchange_strong(&trailer->openers[i], &expected, after)) {
            break;
        }
    }
    if (trailer != NULL) {
        munmap(trailer, TRAILER_BYTES);
    }
}

static bool runs(int pid)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *end = strrchr(text, ')');
    return end != NULL && end[2] != 'Z' && end[2] != 'X';
}

/* A process that has an allocation open, or 0. */
int stub_opener_of(int fd)
{
    Trailer *trailer = stub_trailer(fd);
    int found = 0;
    for (size_t i = 0; trailer != NULL && i < sizeof trailer->openers / sizeof(int); i++) {
        const int pid = trailer->openers[i];
        if (pid && runs(pid)) {
            found = pid;
        }
    }
    if (trailer != NULL) {
        munmap(trailer, TRAILER_BYTES);
    }
    return found;
}

/* Of the allocation of another process: a descriptor, or -1 if it is gone. */
static int open_memory(const Contents *contents)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", contents->pid, contents->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat found;
    if (fd >= 0 && (fstat(fd, &found) || found.st_ino != contents->inode)) {
        close(fd);
        return -1;
    }
    return fd;
}

static Result map(const Contents *contents, int device, Address *address)
{
    const int fd = open_memory(contents);
    if (fd < 0) {
        return INVALID_HANDLE;
    }
    const size_t size = stub_whole_pages(contents->size);
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        close(fd);
        return MAPPING_FAILED;
    }
    stub_note_opener(fd, 0, getpid());
    stub_add_region((Region){.base = (Address)at, .size = contents->size, .kind = OPENED,
        .device = device, .readable = true, .writable = true, .fd = fd,
        .inode = contents->inode, .references = 1});
    COUNT(opened)++;
    *address = (Address)at;
    return OK;
}

EXPORT Result cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags)
{
    ENTER(cuIpcOpenMemHandle_v2);
    Contents contents;
    memcpy(&contents, &handle, sizeof contents);
    if (contents.magic != MAGIC || flags != 1) {
        return INVALID_VALUE;
    }
    if (contents.pid == getpid()) {
        return INVALID_CONTEXT;
    }
    const int device = stub_device_of(contents.uuid);
    if (device < 0) {
        return INVALID_DEVICE;
    }
    if (device != stub_context()->device) {
        return stub_refuse(INVALID_DEVICE, "memory of another GPU than the context's");
    }
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region *open = stub_opened(contents.inode);
    Result result = OK;
    if (open != NULL) {
        open->references++;
        *address = open->base;
    } else {
        result = map(&contents, device, address);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return result;
}

EXPORT Result cuIpcCloseMemHandle(Address address)
{
    ENTER(cuIpcCloseMemHandle);
    pthread_rwlock_wrlock(&stub_memory_lock);
    Region *region = stub_region_at(address, OPENED);
    const bool found = region != NULL;
    if (found && --region->references == 0) {
        stub_note_opener(region->fd, getpid(), 0);
        close(region->fd);
        munmap((void *)region->base, stub_whole_pages(region->size));
        stub_remove_region(region);
        COUNT(opened)--;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    return found ? OK : stub_refuse(INVALID_VALUE, "%#lx is not open", address);
}
