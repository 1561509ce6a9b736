/* SPDX-License-Identifier: Apache-2.0 */
/* The table of settings, errors on demand, refusals, and what is random. */
#include "stub.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const char *const SETTING_NAMES[] = {
#define NAME(name, value) #name,
    SETTINGS(NAME)
#undef NAME
};
static const int64_t DEFAULTS[] = {
#define NAME(name, value) value,
    SETTINGS(NAME)
#undef NAME
};
static const char *const CALL_NAMES[] = {
#define NAME(name) #name,
    CALLS(NAME)
#undef NAME
};
#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

static pthread_once_t table_once = PTHREAD_ONCE_INIT;
static _Atomic int64_t own_table[SLOTS];
static _Atomic int64_t *table = own_table;
static atomic_int lost;
static _Thread_local int current_call = -1;

static void find_table(void)
{
    const char *path = getenv("CUDA_STUB_CONTROL");
    if (path != NULL && *path) {
        const int fd = open(path, O_RDWR | O_CLOEXEC);
        void *found = MAP_FAILED;
        if (fd >= 0) {
            found = mmap(NULL, sizeof own_table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            close(fd);
        }
        if (found == MAP_FAILED) {
            fprintf(stderr, "cuda stub: CUDA_STUB_CONTROL: %s cannot be mapped\n", path);
            abort();
        }
        table = found;
        return;
    }
    for (int i = 0; i < LENGTH(DEFAULTS); i++) {
        char variable[64] = "CUDA_STUB_";
        for (const char *at = SETTING_NAMES[i]; *at; at++) {
            const size_t length = strlen(variable);
            variable[length] = *at >= 'a' && *at <= 'z' ? (char)(*at - 'a' + 'A') : *at;
            variable[length + 1] = 0;
        }
        const char *given = getenv(variable);
        table[i] = given != NULL ? atoll(given) : DEFAULTS[i];
    }
}

EXPORT _Atomic int64_t *stub_table(void)
{
    pthread_once(&table_once, find_table);
    return table;
}

/* As if the process had never called the driver: whatever it has is gone, streams end. Settings
 * stay. */
EXPORT void stubReset(void)
{
    stub_end_streams(-1);
    stub_forget_events(-1);
    stub_forget_modules(-1);
    stub_forget_memory(-1);
    stub_forget_handles();
    stub_forget_devices();
    stub_forget_loss();
    for (int i = LENGTH(SETTING_NAMES); i < FIRST_CALL; i++) {
        stub_table()[i] = 0;
    }
}

static void say(const char *format, va_list arguments)
{
    char line[512];
    vsnprintf(line, sizeof line, format, arguments);
    const char *name = current_call < 0 ? "a stream" : CALL_NAMES[current_call];
    fprintf(stderr, "cuda stub: %s: %s\n", name, line);
}

Result stub_refuse(Result code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    COUNT(refusals)++;
    return code;
}

static bool is_sticky(Result code)
{
    static const Result STICKY[] = {
        214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999};
    for (int i = 0; i < LENGTH(STICKY); i++) {
        if (STICKY[i] == code) {
            return true;
        }
    }
    return false;
}

Result stub_lost(void)
{
    if (SETTING(lose)) {
        const int code = (int)atomic_exchange(&SETTING(lose), 0);
        if (code) {
            lost = code;
        }
    }
    return lost;
}

void stub_lose(Result code, const char *format, ...)
{
    int none = 0;
    if (atomic_compare_exchange_strong(&lost, &none, code)) {
        va_list arguments;
        va_start(arguments, format);
        say(format, arguments);
        va_end(arguments);
    }
}

void stub_forget_loss(void)
{
    lost = 0;
}

/* An error that a test has asked for, or 0. */
static Result demanded(_Atomic int64_t *slot)
{
    const Result code = (Result)slot[CODE];
    if (!code || (slot[AT] > 1 && atomic_fetch_sub(&slot[AT], 1) > 1)) {
        return OK;
    }
    if (slot[TIMES] > 0 && atomic_fetch_sub(&slot[TIMES], 1) == 1) {
        slot[CODE] = 0;
    }
    if (is_sticky(code)) {
        lost = code;
    }
    return code;
}

Result stub_enter(int call, bool needs_context)
{
    current_call = call;
    _Atomic int64_t *slot = stub_table() + FIRST_CALL + call * CALL_FIELDS;
    slot[CALLED]++;
    stub_nap((uint64_t)slot[TAKES_US]);
    while (slot[HANG]) {
        stub_nap(1000);
    }
    const Result code = demanded(slot);
    if (code || call == CALL_cuInit) {
        return code;
    }
    if (!stub_initialized()) {
        return NOT_INITIALIZED;
    }
    if (stub_lost()) {
        return lost;
    }
    return needs_context && stub_context() == NULL ? INVALID_CONTEXT : OK;
}

void stub_nap(uint64_t us)
{
    if (!us) {
        return;
    }
    struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    nanosleep(&time, NULL);
}

Random stub_random(uint64_t salt)
{
    const uint64_t seed = (uint64_t)SETTING(seed) * 0x9e3779b97f4a7c15u;
    const uint64_t process = (uint64_t)getpid() * 0xbf58476d1ce4e5b9u;
    return (Random){(seed ^ process ^ (salt * 0x94d049bb133111ebu)) | 1};
}

uint64_t stub_below(Random *random, uint64_t bound)
{
    uint64_t state = random->state;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    random->state = state;
    return bound ? (state >> 11) % bound : 0;
}

uint64_t stub_any(uint64_t bound)
{
    static atomic_uint threads;
    static _Thread_local Random random;
    if (!random.state) {
        random = stub_random(1000000u + atomic_fetch_add(&threads, 1));
    }
    return stub_below(&random, bound);
}
