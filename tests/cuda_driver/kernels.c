/* SPDX-License-Identifier: Apache-2.0 */
/* Modules of PTX, and the kernels `gather_W` and `scatter_W`, which move units of W bytes.
 *
 * Of the PTX only its version and the names of its entries are read. What the kernels do is written
 * here again, from `lmcache_redis/device/table.py`:
 *
 *     rows, block_ids, staging, n_blocks, staging_stride_bytes
 *
 * A program moves the tile of one row (of eight numbers) and of one chunk, at most 512 units.
 */
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNITS_PER_TILE 512
#define THREADS 128
#define PARAMETERS 5

typedef struct Function {
    char name[64];
    bool scatters;
    unsigned width;
} Function;

typedef struct Module {
    Context *context;
    Function functions[16];
    int count;
    struct Module *next;
} Module;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Module *modules;

/* "gather_16" and the like. */
static bool read_name(Function *function)
{
    char rest[8] = "";
    if (sscanf(function->name, "gather_%u%7s", &function->width, rest) < 1) {
        function->scatters = true;
        if (sscanf(function->name, "scatter_%u%7s", &function->width, rest) < 1) {
            return false;
        }
    }
    const unsigned width = function->width;
    return !*rest && width && width <= 16 && (width & (width - 1)) == 0;
}

static Result read_ptx(const char *text, Module *module)
{
    int major, minor;
    const char *version = strstr(text, ".version");
    if (version == NULL || sscanf(version, ".version %d.%d", &major, &minor) != 2) {
        return stub_refuse(INVALID_PTX, "no .version");
    }
    if (major * 10 + minor > SETTING(ptx_version)) {
        return UNSUPPORTED_PTX;
    }
    for (const char *at = text; (at = strstr(at, ".entry")) != NULL; at++) {
        if (module->count == 16) {
            return stub_refuse(INVALID_PTX, "more entries than the stub holds");
        }
        Function *function = &module->functions[module->count++];
        if (sscanf(at, ".entry %63[A-Za-z0-9_]", function->name) != 1 || !read_name(function)) {
            return stub_refuse(INVALID_PTX, "entry '%s': the stub knows gather_W and scatter_W",
                function->name);
        }
    }
    return module->count ? OK : stub_refuse(INVALID_PTX, "no .entry");
}

EXPORT Result cuModuleLoadData(Module **module, const char *text)
{
    ENTER(cuModuleLoadData);
    Module *loaded = calloc(1, sizeof *loaded);
    loaded->context = stub_context();
    const Result result = read_ptx(text, loaded);
    if (result) {
        free(loaded);
        return result;
    }
    pthread_mutex_lock(&lock);
    loaded->next = modules;
    modules = loaded;
    pthread_mutex_unlock(&lock);
    COUNT(modules)++;
    *module = loaded;
    return OK;
}

/* With the lock. */
static Module *module_at(const void *handle)
{
    Module *module = modules;
    while (module != NULL && module != handle) {
        module = module->next;
    }
    return module;
}

EXPORT Result cuModuleGetFunction(Function **found, void *handle, const char *name)
{
    ENTER(cuModuleGetFunction);
    pthread_mutex_lock(&lock);
    Module *module = module_at(handle);
    Result result = module != NULL ? NOT_FOUND : INVALID_HANDLE;
    for (int i = 0; module != NULL && i < module->count; i++) {
        if (strcmp(module->functions[i].name, name) == 0) {
            *found = &module->functions[i];
            result = OK;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* With the lock of memory. NULL, and the process has lost the GPU, if it may not be accessed. */
static char *access_of(Address address, size_t size, size_t alignment, bool to_write,
    const Region **near)
{
    if (address % alignment) {
        stub_lose(MISALIGNED_ADDRESS, "a kernel accesses %lu bytes at %#lx", size, address);
        return NULL;
    }
    char *found = stub_reach_near(address, size, to_write, near);
    if (found == NULL) {
        stub_lose(ILLEGAL_ADDRESS, "a kernel accesses %lu bytes at %#lx", size, address);
    }
    return found;
}

enum { ROWS, IDS, STAGING, N_BLOCKS, STRIDE, GRID_X, GRID_Y, WIDTH, SCATTERS };

/* One program. False: the process has lost the GPU. */
static bool run_program(const uint64_t *numbers, uint64_t tile, uint64_t chunk)
{
    const Region *of_row = NULL, *of_ids = NULL, *of_page = NULL, *of_stage = NULL;
    const Address row_address = numbers[ROWS] + tile * 64;
    const int64_t *row = (int64_t *)access_of(row_address, 64, 8, false, &of_row);
    if (row == NULL) {
        return false;
    }
    const int64_t address = row[0], block_stride = row[1], staged = row[2], first_block = row[3];
    const int32_t period = (int32_t)row[4], units = (int32_t)row[5];
    const size_t width = numbers[WIDTH];
    const bool scatters = numbers[SCATTERS];
    if (period <= 0) {
        stub_lose(719, "a tile with a period of %d", period);
        return false;
    }
    const Address ids = numbers[IDS] + chunk * numbers[N_BLOCKS] * 8;
    const Address stage = numbers[STAGING] + chunk * numbers[STRIDE] + (Address)staged;
    for (int32_t unit = 0; unit < units && unit < UNITS_PER_TILE; unit++) {
        const Address id_address = ids + (Address)(first_block + unit / period) * 8;
        const int64_t *id = (int64_t *)access_of(id_address, 8, 8, false, &of_ids);
        if (id == NULL) {
            return false;
        }
        if (*id < 0) {
            continue;
        }
        const Address in_block = (Address)(unit % period) * width;
        const Address page = (Address)(address + *id * block_stride) + in_block;
        const Address part = stage + (Address)unit * width;
        char *in_page = access_of(page, width, width, scatters, &of_page);
        char *in_stage = in_page != NULL
            ? access_of(part, width, width, !scatters, &of_stage) : NULL;
        if (in_stage == NULL) {
            return false;
        }
        memcpy(scatters ? in_page : in_stage, scatters ? in_stage : in_page, width);
    }
    return true;
}

static void run_kernel(Stream *stream, Operation *operation)
{
    const uint64_t *numbers = operation->numbers;
    const uint64_t programs = numbers[GRID_X] * numbers[GRID_Y];
    Random *random = stub_stream_random(stream);
    /* In any order: a step that has no factor in common with the number visits each once. */
    uint64_t step = 1 + stub_below(random, programs), common = 0;
    do {
        uint64_t a = ++step, b = programs;
        while (b) {
            const uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        common = a;
    } while (common != 1);
    uint64_t program = stub_below(random, programs);
    for (uint64_t i = 0; i < programs && !stub_lost(); i++) {
        program = (program + step) % programs;
        if (stub_below(random, 64) == 0) {
            stub_pause(stream);
        }
        pthread_rwlock_rdlock(&stub_memory_lock);
        const uint64_t chunk = program / numbers[GRID_X], tile = program % numbers[GRID_X];
        const bool good = run_program(numbers, tile, chunk);
        pthread_rwlock_unlock(&stub_memory_lock);
        if (!good) {
            return;
        }
    }
}

EXPORT Result cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
    unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, void *handle,
    void **parameters, void **extra)
{
    ENTER(cuLaunchKernel);
    Stream *stream = stub_stream(handle);
    if (stream == NULL) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&lock);
    Module *module = modules;
    while (module != NULL && (function < module->functions ||
                              function >= module->functions + module->count)) {
        module = module->next;
    }
    pthread_mutex_unlock(&lock);
    if (module == NULL) {
        return stub_refuse(INVALID_HANDLE, "%p is no function, or its module is gone",
            (void *)function);
    }
    if (module->context != stub_context() || stub_stream_context(stream) != module->context) {
        return INVALID_HANDLE;
    }
    if (!grid_x || !grid_y || grid_z != 1 || grid_x > INT32_MAX || grid_y > 65535) {
        return INVALID_VALUE;
    }
    if (block_x != THREADS || block_y != 1 || block_z != 1 || shared_bytes) {
        return stub_refuse(INVALID_VALUE, "%d threads and no shared memory", THREADS);
    }
    if (parameters == NULL || extra != NULL) {
        return stub_refuse(INVALID_VALUE, "parameters are given by kernelParams");
    }
    Operation operation = {.run = run_kernel};
    for (int i = 0; i < PARAMETERS; i++) {
        memcpy(&operation.numbers[i], parameters[i], 8);
    }
    operation.numbers[GRID_X] = grid_x;
    operation.numbers[GRID_Y] = grid_y;
    operation.numbers[WIDTH] = function->width;
    operation.numbers[SCATTERS] = function->scatters;
    stub_enqueue(stream, operation);
    return OK;
}

void stub_forget_modules(int device)
{
    pthread_mutex_lock(&lock);
    for (Module **at = &modules; *at != NULL;) {
        Module *module = *at;
        if (device < 0 || module->context->device == device) {
            *at = module->next;
            free(module);
            COUNT(modules)--;
        } else {
            at = &module->next;
        }
    }
    pthread_mutex_unlock(&lock);
}

