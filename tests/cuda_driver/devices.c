/* SPDX-License-Identifier: Apache-2.0 */
/* Initialisation, GPUs and their primary contexts. */
#include "stub.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    uint8_t uuid[16];
    bool is_instance; /* Of MIG. */
} Device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Device devices[MAX_DEVICES];
static Context contexts[MAX_DEVICES];
static int device_count;
static _Atomic pid_t initialized_by;
static _Thread_local Context *current;

bool stub_initialized(void)
{
    return initialized_by == getpid();
}

Context *stub_context(void)
{
    return current != NULL && current->retained > 0 ? current : NULL;
}

const uint8_t *stub_uuid(int device)
{
    return devices[device].uuid;
}

int stub_device_of(const uint8_t uuid[16])
{
    for (int i = 0; i < device_count; i++) {
        if (memcmp(devices[i].uuid, uuid, 16) == 0) {
            return i;
        }
    }
    return -1;
}

/* Of "GPU-" or "MIG-" and 32 digits, with more hyphens or without. */
static bool read_uuid(const char *text, uint8_t uuid[16])
{
    int digits = 0;
    memset(uuid, 0, 16);
    for (text += strlen(text) < 4 ? strlen(text) : 4; *text && digits < 32; text++) {
        if (*text == '-') {
            continue;
        }
        if (!isxdigit((unsigned char)*text)) {
            break;
        }
        const int value = isdigit((unsigned char)*text) ? *text - '0' : tolower(*text) - 'a' + 10;
        uuid[digits / 2] |= (uint8_t)(value << (digits % 2 ? 0 : 4));
        digits++;
    }
    return digits == 32;
}

static int find_devices(Device found[MAX_DEVICES])
{
    int count = 0;
    const char *given = getenv("CUDA_STUB_UUIDS");
    if (given == NULL) {
        for (; count < SETTING(devices) && count < MAX_DEVICES; count++) {
            memset(found[count].uuid, 0x11 * (count + 1), 16);
        }
        return count;
    }
    char text[2048];
    snprintf(text, sizeof text, "%s", given);
    char *rest = text;
    for (char *word; count < MAX_DEVICES && (word = strsep(&rest, ",")) != NULL; count++) {
        found[count].is_instance = strncmp(word, "MIG-", 4) == 0;
        if (!read_uuid(word, found[count].uuid)) {
            fprintf(stderr, "cuda stub: CUDA_STUB_UUIDS: %s is no UUID\n", word);
            abort();
        }
    }
    return count;
}

/* The place of a word of CUDA_VISIBLE_DEVICES, or -1. */
static int chosen(const char *word, const Device *found, int count)
{
    char *end;
    const long number = strtol(word, &end, 10);
    if (end != word && *end == 0) {
        return number >= 0 && number < count ? (int)number : -1;
    }
    uint8_t uuid[16];
    for (int i = 0; read_uuid(word, uuid) && i < count; i++) {
        if (memcmp(found[i].uuid, uuid, sizeof uuid) == 0) {
            return i;
        }
    }
    return -1;
}

static void choose_devices(void)
{
    Device found[MAX_DEVICES];
    memset(found, 0, sizeof found);
    const int count = find_devices(found);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    device_count = 0;
    if (visible == NULL) {
        memcpy(devices, found, sizeof found);
        device_count = count;
    } else {
        char text[2048];
        snprintf(text, sizeof text, "%s", visible);
        char *rest = text;
        for (char *word; device_count < MAX_DEVICES && (word = strsep(&rest, ",")) != NULL;) {
            const int place = chosen(word, found, count);
            if (place < 0) {
                break; /* Those after a wrong one are invisible. */
            }
            devices[device_count++] = found[place];
        }
    }
    for (int i = 0; i < device_count; i++) {
        if (devices[i].is_instance) { /* CUDA gives a process one instance. */
            devices[0] = devices[i];
            device_count = 1;
        }
    }
    for (int i = 0; i < device_count; i++) {
        contexts[i] = (Context){.device = i};
    }
}

EXPORT Result cuInit(unsigned flags)
{
    ENTER_WITHOUT_CONTEXT(cuInit);
    if (flags) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    Result result = OK;
    if (!initialized_by) {
        choose_devices();
        if (device_count) {
            initialized_by = getpid();
        } else {
            result = NO_DEVICE;
        }
    } else if (!stub_initialized()) {
        result = NOT_INITIALIZED; /* A forked child of a process that has used the driver. */
    }
    pthread_mutex_unlock(&lock);
    return result;
}

bool stub_is_ordinal(int device)
{
    return device >= 0 && device < device_count;
}

/* Of a CUdevice. */
static int ordinal_of(int device)
{
    return device - (int)SETTING(first_device);
}

EXPORT Result cuDriverGetVersion(int *version)
{
    *version = (int)SETTING(driver_version);
    return OK;
}

EXPORT Result cuDeviceGetCount(int *count)
{
    ENTER_WITHOUT_CONTEXT(cuDeviceGetCount);
    *count = device_count;
    return OK;
}

EXPORT Result cuDeviceGet(int *device, int ordinal)
{
    ENTER_WITHOUT_CONTEXT(cuDeviceGet);
    *device = ordinal + (int)SETTING(first_device);
    return stub_is_ordinal(ordinal) ? OK : INVALID_DEVICE;
}

EXPORT Result cuDeviceGetName(char *name, int size, int device)
{
    ENTER_WITHOUT_CONTEXT(cuDeviceGetName);
    device = ordinal_of(device);
    if (!stub_is_ordinal(device) || size <= 0) {
        return stub_is_ordinal(device) ? INVALID_VALUE : INVALID_DEVICE;
    }
    snprintf(name, (size_t)size, "Stub GPU");
    return OK;
}

EXPORT Result cuDeviceGetUuid_v2(uint8_t *uuid, int device)
{
    ENTER_WITHOUT_CONTEXT(cuDeviceGetUuid_v2);
    device = ordinal_of(device);
    if (!stub_is_ordinal(device)) {
        return INVALID_DEVICE;
    }
    memcpy(uuid, devices[device].uuid, 16);
    return OK;
}

EXPORT Result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER_WITHOUT_CONTEXT(cuDeviceGetAttribute);
    device = ordinal_of(device);
    if (!stub_is_ordinal(device)) {
        return INVALID_DEVICE;
    }
    switch (attribute) {
    case 20: /* COMPUTE_MODE */
        *value = (int)SETTING(compute_mode);
        return OK;
    case 103: /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    case 110: /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
        *value = 1;
        return OK;
    case 75: /* COMPUTE_CAPABILITY_MAJOR */
        *value = 9;
        return OK;
    case 76: /* COMPUTE_CAPABILITY_MINOR */
        *value = 0;
        return OK;
    case 91: /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
        *value = !SETTING(distinct_pinned);
        return OK;
    case 128: /* HANDLE_TYPE_FABRIC_SUPPORTED */
        *value = !!SETTING(fabric);
        return OK;
    case 122: /* CAN_USE_64_BIT_STREAM_MEM_OPS */
        *value = !!SETTING(write_values);
        return OK;
    default:
        return stub_refuse(INVALID_VALUE, "attribute %d is not in the stub", attribute);
    }
}

EXPORT Result cuDevicePrimaryCtxRetain(Context **context, int device)
{
    ENTER_WITHOUT_CONTEXT(cuDevicePrimaryCtxRetain);
    device = ordinal_of(device);
    if (!stub_is_ordinal(device)) {
        return INVALID_DEVICE;
    }
    pthread_mutex_lock(&lock);
    if (contexts[device].retained++ == 0) {
        COUNT(contexts)++;
    }
    pthread_mutex_unlock(&lock);
    *context = &contexts[device];
    return OK;
}

EXPORT Result cuDevicePrimaryCtxRelease_v2(int device)
{
    ENTER_WITHOUT_CONTEXT(cuDevicePrimaryCtxRelease_v2);
    device = ordinal_of(device);
    if (!stub_is_ordinal(device)) {
        return INVALID_DEVICE;
    }
    pthread_mutex_lock(&lock);
    const int left = contexts[device].retained - 1;
    if (left < 0) {
        pthread_mutex_unlock(&lock);
        return INVALID_CONTEXT;
    }
    contexts[device].retained = left;
    if (left == 0) {
        stub_end_streams(device); /* The context ends, and what it has. */
        stub_forget_events(device);
        stub_forget_modules(device);
        stub_forget_memory(device);
        contexts[device].legacy = NULL;
        COUNT(contexts)--;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT Result cuCtxSetCurrent(Context *context)
{
    ENTER_WITHOUT_CONTEXT(cuCtxSetCurrent);
    if (context != NULL && (context < contexts || context >= contexts + device_count ||
                            context->retained <= 0)) {
        return INVALID_CONTEXT;
    }
    current = context;
    return OK;
}

EXPORT Result cuCtxGetCurrent(Context **context)
{
    ENTER_WITHOUT_CONTEXT(cuCtxGetCurrent);
    *context = stub_context();
    return OK;
}

EXPORT Result cuCtxGetDevice(int *device)
{
    ENTER(cuCtxGetDevice);
    *device = stub_context()->device + (int)SETTING(first_device);
    return OK;
}

EXPORT Result cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize);
    return stub_wait_for_device(stub_context()->device);
}

void stub_forget_devices(void)
{
    for (int i = 0; i < device_count; i++) {
        contexts[i] = (Context){.device = i};
    }
    device_count = 0;
    initialized_by = 0;
}
