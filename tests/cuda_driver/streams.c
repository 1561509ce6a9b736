/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, one thread each, which do what is enqueued. */
#include "stub.h"

#include <stdlib.h>
#include <time.h>

struct Stream {
    Context *context;
    int number; /* From 1; 0: a default stream. */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Operation *head, *tail;
    uint64_t enqueued, done;
    atomic_bool destroyed; /* By cuStreamDestroy: it ends when it has nothing to do. */
    atomic_bool ended;     /* It does nothing more. */
    Random random;
    Stream *next;
};

/* Streams are never freed: events refer to them, and a use after the end is found. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams;
static int made;

Context *stub_stream_context(const Stream *stream)
{
    return stream->context;
}

bool stub_is_legacy(const Stream *stream)
{
    return stream->number == 0;
}

Random *stub_stream_random(Stream *stream)
{
    return &stream->random;
}

static bool hangs(const Stream *stream)
{
    const int64_t hang = SETTING(hang);
    return hang < 0 || (hang && hang == stream->number) ||
        SETTING(hang_gpu) == stream->context->device + 1;
}

void stub_pause(Stream *stream)
{
    uint64_t left = stub_below(&stream->random, (uint64_t)SETTING(delay_us));
    while ((left || hangs(stream)) && !stream->ended && !stub_lost()) {
        const uint64_t now = left && left < 1000 ? left : 1000;
        stub_nap(now);
        left -= left < now ? left : now;
    }
}

static void *serve(void *given)
{
    Stream *stream = given;
    pthread_mutex_lock(&stream->lock);
    while (!stream->ended && !(stream->destroyed && stream->head == NULL)) {
        Operation *operation = stream->head;
        if (operation == NULL) {
            pthread_cond_wait(&stream->changed, &stream->lock);
            continue;
        }
        pthread_mutex_unlock(&stream->lock);
        stub_pause(stream);
        if (!stub_lost() && !stream->ended) {
            operation->run(stream, operation);
        }
        if (operation->end != NULL) {
            operation->end(operation);
        }
        pthread_mutex_lock(&stream->lock);
        stream->head = operation->next;
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
        free(operation);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static Stream *new_stream(Context *context, bool legacy)
{
    Stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    stream->number = legacy ? 0 : ++made;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&stream->changed, &clock);
    stream->random = stub_random((uint64_t)made + (legacy ? 5000u : 1u));
    stream->next = streams;
    streams = stream;
    pthread_create(&stream->thread, NULL, serve, stream);
    return stream;
}

Stream *stub_stream(void *handle)
{
    pthread_mutex_lock(&list_lock);
    Stream *found = NULL;
    if (handle == NULL || handle == (void *)1) {
        Context *context = stub_context();
        if (context->legacy == NULL) {
            context->legacy = new_stream(context, true);
        }
        found = context->legacy;
    } else {
        for (found = streams; found != NULL && found != handle; found = found->next) {
        }
    }
    pthread_mutex_unlock(&list_lock);
    if (found == NULL || found->destroyed || found->ended) {
        stub_refuse(INVALID_HANDLE, "%p is no stream, or a destroyed one", handle);
        return NULL;
    }
    return found;
}

uint64_t stub_enqueue(Stream *stream, Operation operation)
{
    Operation *added = malloc(sizeof *added);
    *added = operation;
    added->next = NULL;
    pthread_mutex_lock(&stream->lock);
    if (stream->head == NULL) {
        stream->head = added;
    } else {
        stream->tail->next = added;
    }
    stream->tail = added;
    const uint64_t place = ++stream->enqueued;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return place;
}

Result stub_wait(Stream *stream, uint64_t place)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->done < place && !stream->ended && !stub_lost()) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 20000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&stream->changed, &stream->lock, &until);
    }
    pthread_mutex_unlock(&stream->lock);
    return stub_lost();
}

uint64_t stub_last_place(Stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    const uint64_t place = stream->enqueued;
    pthread_mutex_unlock(&stream->lock);
    return place;
}

bool stub_has_reached(Stream *stream, uint64_t place)
{
    pthread_mutex_lock(&stream->lock);
    const bool reached = stream->done >= place || stream->ended;
    pthread_mutex_unlock(&stream->lock);
    return reached;
}

Result stub_wait_for_device(int device)
{
    pthread_mutex_lock(&list_lock);
    Stream *stream = streams; /* Those that are added later need no wait. */
    pthread_mutex_unlock(&list_lock);
    for (; stream != NULL; stream = stream->next) {
        if (stream->context->device == device) {
            stub_wait(stream, stub_last_place(stream));
        }
    }
    return stub_lost();
}

void stub_end_streams(int device)
{
    pthread_mutex_lock(&list_lock);
    for (Stream *stream = streams; stream != NULL; stream = stream->next) {
        if (stream->ended || (device >= 0 && stream->context->device != device)) {
            continue;
        }
        pthread_mutex_lock(&stream->lock);
        stream->ended = true;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
        COUNT(streams) -= stream->number != 0 && !stream->destroyed;
        pthread_join(stream->thread, NULL);
    }
    if (device < 0) {
        made = 0;
    }
    pthread_mutex_unlock(&list_lock);
}

EXPORT Result cuStreamCreate(Stream **stream, unsigned flags)
{
    ENTER(cuStreamCreate);
    if (flags != 1) {
        return stub_refuse(NOT_SUPPORTED, "only CU_STREAM_NON_BLOCKING is in the stub");
    }
    pthread_mutex_lock(&list_lock);
    *stream = new_stream(stub_context(), false);
    pthread_mutex_unlock(&list_lock);
    COUNT(streams)++;
    return OK;
}

EXPORT Result cuStreamDestroy_v2(void *handle)
{
    ENTER(cuStreamDestroy_v2);
    Stream *stream = stub_stream(handle);
    if (stream == NULL || stub_is_legacy(stream)) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&stream->lock);
    stream->destroyed = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    COUNT(streams)--;
    return OK;
}

EXPORT Result cuStreamSynchronize(void *handle)
{
    ENTER(cuStreamSynchronize);
    Stream *stream = stub_stream(handle);
    return stream == NULL ? INVALID_HANDLE : stub_wait(stream, stub_last_place(stream));
}

static void write_value(Stream *stream, Operation *operation)
{
    (void)stream;
    pthread_rwlock_rdlock(&stub_memory_lock);
    char *at = stub_reach(operation->numbers[0], 8, true);
    if (at != NULL) {
        atomic_store_explicit((_Atomic uint64_t *)at, operation->numbers[1], memory_order_release);
    }
    pthread_rwlock_unlock(&stub_memory_lock);
    if (at == NULL) {
        stub_lose(ILLEGAL_ADDRESS, "the place of a value is gone: %#lx", operation->numbers[0]);
    }
}

EXPORT Result cuStreamWriteValue64_v2(void *handle, Address address, uint64_t value, unsigned flags)
{
    ENTER(cuStreamWriteValue64_v2);
    Stream *stream = stub_stream(handle);
    if (stream == NULL) {
        return INVALID_HANDLE;
    }
    if (!SETTING(write_values)) {
        return NOT_SUPPORTED;
    }
    if (flags) {
        return stub_refuse(INVALID_VALUE, "flags %#x are not in the stub", flags);
    }
    pthread_rwlock_rdlock(&stub_memory_lock);
    const bool reached = stub_reach(address, 8, true) != NULL;
    pthread_rwlock_unlock(&stub_memory_lock);
    if (address % 8 || !reached) {
        return stub_refuse(INVALID_VALUE, "%#lx: not aligned, or no memory of the GPU", address);
    }
    stub_enqueue(stream, (Operation){.run = write_value, .numbers = {address, value}});
    return OK;
}
