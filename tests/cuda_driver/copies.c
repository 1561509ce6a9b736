/* SPDX-License-Identifier: Apache-2.0 */
/* Copies: in pieces, in the order of their stream, and as the kind of host memory says. */
#include "stub.h"

#include <stdlib.h>
#include <string.h>

typedef enum { OF_GPU, OF_PINNED, OF_PAGEABLE, OF_NOTHING } Place;

typedef struct {
    Address to, from;
    size_t size;
    Place to_place, from_place;
    char *taken; /* The source's bytes, if they were read early. */
} Copy;

/* Where a range is. Of nothing, after a refusal, if it lies only in part in one memory. */
static Place place_of(Address address, size_t size, bool to_write)
{
    const Address host = address >= DISTINCT_OFFSET ? address - DISTINCT_OFFSET : address;
    const Context *context = stub_context();
    Place place = OF_NOTHING;
    pthread_rwlock_rdlock(&stub_memory_lock);
    if (stub_reach_for_copy(address, size, to_write) != NULL) {
        const Region *region = stub_region_of(host);
        const bool pinned_here = region->everywhere || region->device == context->device;
        place = stub_is_device(region) ? OF_GPU : pinned_here ? OF_PINNED : OF_PAGEABLE;
    } else if (stub_overlap(host, size) == NULL && stub_is_in_process(address, size)) {
        place = OF_PAGEABLE;
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    if (place == OF_NOTHING) {
        stub_refuse(INVALID_VALUE, "%lu bytes at %#lx: not all in one allocation, in one "
            "registration, or in none", size, address);
    }
    return place;
}

/* 0 if the copy is well defined. */
static Result check(Copy *copy)
{
    if (!copy->size || copy->to + copy->size < copy->to || copy->from + copy->size < copy->from) {
        return stub_refuse(INVALID_VALUE, "a copy of %lu bytes", copy->size);
    }
    copy->to_place = place_of(copy->to, copy->size, true);
    copy->from_place = place_of(copy->from, copy->size, false);
    if (copy->to_place == OF_NOTHING || copy->from_place == OF_NOTHING) {
        return INVALID_VALUE;
    }
    if (copy->to_place != OF_GPU && copy->from_place != OF_GPU) {
        return stub_refuse(INVALID_VALUE, "a copy from host memory to host memory");
    }
    if (copy->to < copy->from + copy->size && copy->from < copy->to + copy->size) {
        return stub_refuse(INVALID_VALUE, "source and destination overlap");
    }
    return OK;
}

static char *reach(Address address, size_t size, Place place, bool to_write)
{
    return place == OF_PAGEABLE ? (char *)address : stub_reach_for_copy(address, size, to_write);
}

/* A piece of a copy. False, and the process has lost the GPU, if its memory is gone. */
static bool move_piece(const Copy *copy, size_t at, size_t size)
{
    pthread_rwlock_rdlock(&stub_memory_lock);
    const char *from = copy->taken != NULL
        ? copy->taken + at : reach(copy->from + at, size, copy->from_place, false);
    char *to = reach(copy->to + at, size, copy->to_place, true);
    if (from != NULL && to != NULL) {
        memcpy(to, from, size);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    if (from == NULL || to == NULL) {
        stub_lose(ILLEGAL_ADDRESS, "a copy of %lu bytes from %#lx to %#lx found its memory gone",
            copy->size, copy->from, copy->to);
    }
    return from != NULL && to != NULL;
}

static void move(Stream *stream, const Copy *copy)
{
    Random *random = stub_stream_random(stream);
    const size_t piece = SETTING(piece_bytes) > 0 ? (size_t)SETTING(piece_bytes) : copy->size;
    const size_t pieces = (copy->size + piece - 1) / piece;
    const bool backwards = stub_below(random, 2);
    for (size_t i = 0; i < pieces; i++) {
        const size_t at = (backwards ? pieces - 1 - i : i) * piece;
        if (i && stub_below(random, 8) == 0) {
            stub_pause(stream);
        }
        const size_t left = copy->size - at;
        if (stub_lost() || !move_piece(copy, at, left < piece ? left : piece)) {
            return;
        }
    }
}

static void run_copies(Stream *stream, Operation *operation)
{
    Copy *copies = operation->data;
    for (size_t left = operation->numbers[0]; left && !stub_lost(); left--) { /* In no order. */
        const size_t chosen = stub_below(stub_stream_random(stream), left);
        const Copy copy = copies[chosen];
        copies[chosen] = copies[left - 1];
        copies[left - 1] = copy;
        move(stream, &copy);
    }
}

static void end_copies(Operation *operation)
{
    Copy *copies = operation->data;
    for (size_t i = 0; i < operation->numbers[0]; i++) {
        free(copies[i].taken);
    }
    free(copies);
}

/* Reads a source now. */
static void take(Copy *copy)
{
    pthread_rwlock_rdlock(&stub_memory_lock);
    const char *from = reach(copy->from, copy->size, copy->from_place, false);
    if (from != NULL) {
        copy->taken = malloc(copy->size);
        memcpy(copy->taken, from, copy->size);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
}

/* Enqueues copies, of which the stream takes the array. */
static uint64_t enqueue(Stream *stream, Copy *copies, size_t count)
{
    return stub_enqueue(stream, (Operation){
        .run = run_copies, .end = end_copies, .data = copies, .numbers = {count}});
}

/* Pageable memory is staged: a destination is complete on return. Of a source, the bytes are read
 * before the return, and the GPU's memory is written then or later. */
static Result submit(Stream *stream, Copy *copy)
{
    bool waits = copy->to_place == OF_PAGEABLE;
    if (copy->from_place == OF_PAGEABLE) {
        if (stub_any(100) < (uint64_t)SETTING(pageable_waits)) {
            waits = true;
        } else {
            take(copy);
        }
    }
    const uint64_t place = enqueue(stream, copy, 1);
    return waits ? stub_wait(stream, place) : OK;
}

static Result copy_one(void *handle, Copy copy, bool to_gpu)
{
    Stream *stream = stub_stream(handle);
    if (stream == NULL) {
        return INVALID_HANDLE;
    }
    const Result result = check(&copy);
    if (result) {
        return result;
    }
    if ((copy.to_place == OF_GPU) != to_gpu || (copy.from_place == OF_GPU) == to_gpu) {
        return stub_refuse(INVALID_VALUE, "an address of the host for one of the GPU, or the other "
            "way round: %#lx to %#lx", copy.from, copy.to);
    }
    Copy *copies = malloc(sizeof *copies);
    *copies = copy;
    return submit(stream, copies);
}

/* From pageable memory it returns when the source has been read: the destination is written in the
 * order of the default stream, of which other streams know nothing. */
EXPORT Result cuMemcpyHtoD_v2(Address to, const void *from, size_t size)
{
    ENTER(cuMemcpyHtoD_v2);
    Stream *stream = stub_stream(NULL);
    Copy copy = {.to = to, .from = (Address)from, .size = size};
    const Result result = check(&copy);
    if (result || copy.from_place == OF_GPU || copy.to_place != OF_GPU) {
        return result ? result : stub_refuse(INVALID_VALUE, "no copy from host to GPU");
    }
    Copy *copies = malloc(sizeof *copies);
    if (copy.from_place == OF_PAGEABLE) {
        take(&copy);
    }
    *copies = copy;
    const uint64_t place = enqueue(stream, copies, 1);
    return copy.from_place == OF_PAGEABLE ? OK : stub_wait(stream, place);
}

EXPORT Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream)
{
    ENTER(cuMemcpyHtoDAsync_v2);
    const Copy copy = {.to = to, .from = (Address)from, .size = size};
    return copy_one(stream, copy, true);
}

EXPORT Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream)
{
    ENTER(cuMemcpyDtoHAsync_v2);
    const Copy copy = {.to = (Address)to, .from = from, .size = size};
    return copy_one(stream, copy, false);
}

typedef struct {
    unsigned order;
    unsigned from_type;
    int from_id;
    unsigned to_type;
    int to_id;
    unsigned flags;
} Attributes;

#define ORDER_STREAM 1

#ifndef WITHOUT_BATCH
static int by_destination(const void *one, const void *other)
{
    const Copy *a = one, *b = other;
    return a->to < b->to ? -1 : a->to > b->to;
}

/* Whether no copy writes what another reads or writes: the batch has no order. Sorts. */
static bool are_independent(Copy *copies, size_t count)
{
    qsort(copies, count, sizeof *copies, by_destination);
    for (size_t i = 0; i + 1 < count; i++) {
        if (copies[i].to + copies[i].size > copies[i + 1].to) {
            return false;
        }
    }
    for (size_t i = 0; i < count; i++) {
        size_t low = 0, high = count; /* The first destination that ends after the source begins. */
        while (low < high) {
            const size_t middle = (low + high) / 2;
            if (copies[middle].to + copies[middle].size <= copies[i].from) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low < count && copies[low].to < copies[i].from + copies[i].size) {
            return false;
        }
    }
    return true;
}

/* CUDA faults on the GPU then (error 700) where attribute 91 is 0. */
static bool needs_device_address(Address address)
{
    pthread_rwlock_rdlock(&stub_memory_lock);
    const Region *region = SETTING(distinct_pinned) ? stub_region_of(address) : NULL;
    const bool needs = region != NULL && region->kind == REGISTERED;
    pthread_rwlock_unlock(&stub_memory_lock);
    return needs;
}

EXPORT Result cuMemcpyBatchAsync(const Address *to, const Address *from, const size_t *sizes,
    size_t count, const Attributes *attributes, const size_t *firsts, size_t attribute_count,
    size_t *failed, void *handle)
{
    ENTER(cuMemcpyBatchAsync);
    *failed = SIZE_MAX;
    Stream *stream = stub_stream(handle);
    if (stream == NULL || stub_is_legacy(stream)) {
        return stub_refuse(INVALID_VALUE, "no stream, or the default one");
    }
    if (!count || attribute_count != 1 || *firsts || attributes->order != ORDER_STREAM ||
        attributes->flags) {
        return stub_refuse(INVALID_VALUE, "%lu copies with %lu attributes: the stub knows one, of "
            "the stream's order, for all copies", count, attribute_count);
    }
    if (SETTING(batch_most) && count > (size_t)SETTING(batch_most)) {
        return INVALID_VALUE;
    }
    Copy *copies = calloc(count, sizeof *copies);
    for (size_t i = 0; i < count; i++) {
        copies[i] = (Copy){.to = to[i], .from = from[i], .size = sizes[i]};
        Result result = check(&copies[i]);
        if (!result && (needs_device_address(to[i]) || needs_device_address(from[i]))) {
            result = stub_refuse(INVALID_VALUE, "the host's address of registered memory, which "
                "is not the GPU's, in a batch");
        }
        if (result) {
            *failed = i;
            free(copies);
            return result;
        }
    }
    if (!are_independent(copies, count)) {
        free(copies);
        return stub_refuse(INVALID_VALUE, "copies of a batch depend on each other");
    }
    enqueue(stream, copies, count);
    return OK;
}
#endif
