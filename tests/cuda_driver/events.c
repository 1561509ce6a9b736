/* SPDX-License-Identifier: Apache-2.0 */
/* Events: places in the queue of a stream. */
#include "stub.h"

#include <stdlib.h>

typedef struct Event {
    Context *context;
    Stream *stream; /* NULL: never recorded. */
    uint64_t place;
    struct Event *next;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Event *events;

static Event *event_of(void *handle)
{
    pthread_mutex_lock(&lock);
    Event *event = events;
    while (event != NULL && event != handle) {
        event = event->next;
    }
    pthread_mutex_unlock(&lock);
    if (event == NULL) {
        stub_refuse(INVALID_HANDLE, "%p is no event, or a destroyed one", handle);
    }
    return event;
}

EXPORT Result cuEventCreate(Event **event, unsigned flags)
{
    ENTER(cuEventCreate);
    if (flags & ~3u) {
        return stub_refuse(INVALID_VALUE, "event flags %#x are not in the stub", flags);
    }
    *event = calloc(1, sizeof **event);
    (*event)->context = stub_context();
    pthread_mutex_lock(&lock);
    (*event)->next = events;
    events = *event;
    pthread_mutex_unlock(&lock);
    COUNT(events)++;
    return OK;
}

EXPORT Result cuEventRecord(void *handle, void *stream_handle)
{
    ENTER(cuEventRecord);
    Event *event = event_of(handle);
    Stream *stream = event != NULL ? stub_stream(stream_handle) : NULL;
    if (stream == NULL || stub_stream_context(stream) != event->context) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&lock);
    event->stream = stream;
    event->place = stub_last_place(stream);
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuEventQuery(void *handle)
{
    ENTER(cuEventQuery);
    const Event *event = event_of(handle);
    if (event == NULL) {
        return INVALID_HANDLE;
    }
    const bool never = event->stream == NULL;
    return never || stub_has_reached(event->stream, event->place) ? OK : NOT_READY;
}

EXPORT Result cuEventSynchronize(void *handle)
{
    ENTER(cuEventSynchronize);
    const Event *event = event_of(handle);
    if (event == NULL) {
        return INVALID_HANDLE;
    }
    return event->stream == NULL ? OK : stub_wait(event->stream, event->place);
}

EXPORT Result cuEventDestroy_v2(void *handle)
{
    ENTER(cuEventDestroy_v2);
    Event *event = event_of(handle);
    if (event == NULL) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&lock);
    for (Event **at = &events; *at != NULL; at = &(*at)->next) {
        if (*at == event) {
            *at = event->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    free(event);
    COUNT(events)--;
    return OK;
}

void stub_forget_events(int device)
{
    pthread_mutex_lock(&lock);
    for (Event **at = &events; *at != NULL;) {
        Event *event = *at;
        if (device < 0 || event->context->device == device) {
            *at = event->next;
            free(event);
            COUNT(events)--;
        } else {
            at = &event->next;
        }
    }
    pthread_mutex_unlock(&lock);
}
