/* SPDX-License-Identifier: Apache-2.0 */
/* A `libcuda.so.1` without a GPU, for tests of code that calls NVIDIA's driver.
 *
 * Device memory is memory of the host in memfds, which other processes open by /proc/PID/fd: so
 * handles are real between processes, and nothing is left behind by a process that is killed. Each
 * stream is a thread. Operations are delayed at random, copies are made in pieces, and the programs
 * of a kernel run in any order, so that a wait that is missing shows as wrong bytes. Fresh memory
 * and freed memory hold poison.
 *
 * It finds races and errors of life cycles. It is no model of speed, of memory order, or of what
 * a GPU makes of PTX. Where CUDA's manual leaves a behaviour undefined, it says so in one line on
 * standard error and returns an error.
 *
 * A process is like one of CUDA's: the child of one that has called cuInit has no GPU (error 3).
 * Memory is counted for each process, and a sticky error is of all its GPUs.
 *
 * Settings are numbers in a table that tests change while processes run: the memory of the file
 * that CUDA_STUB_CONTROL names, or else memory of this process, where CUDA_STUB_SEED is the first
 * value of `seed`, and so on. A process that starts may have
 * CUDA_STUB_UUIDS: those of its GPUs, separated by commas, "GPU-" or "MIG-" and 32 hexadecimal
 * digits. Of instances of MIG a process sees one.
 *
 * CUDA_VISIBLE_DEVICES chooses by numbers or by whole UUIDs.
 */
#ifndef STUB_H
#define STUB_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

typedef int Result;
typedef uint64_t Address;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAPPING_FAILED = 205,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX = 222,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    MISALIGNED_ADDRESS = 716,
    NOT_SUPPORTED = 801,
};

/* Settings: name and default. */
#define SETTINGS(X) \
    X(seed, 1)            /* of what is random, mixed with the process's id */ \
    X(delay_us, 0)        /* the longest wait before an operation of a stream */ \
    X(piece_bytes, 65536) /* in which copies are made, with waits between them */ \
    X(devices, 1)         /* GPUs, unless CUDA_STUB_UUIDS names them */ \
    X(first_device, 0)    /* the CUdevice of the first GPU: others follow */ \
    X(compute_mode, 0)    /* as an attribute says it; it forbids nothing */ \
    X(driver_version, 12080) \
    X(ptx_version, 80)    /* the newest `.version` that is taken, times ten */ \
    X(write_values, 1)    /* whether streams write 64-bit values */ \
    X(distinct_pinned, 0) /* registered memory has another address on the GPU */ \
    X(pin_us_per_mib, 0)  /* how long a registration takes */ \
    X(pin_most_mib, 0)    /* a larger registration fails with error 2; 0: no limit */ \
    X(pageable_waits, 50) /* per cent of the copies from pageable memory that wait for the stream */ \
    X(hang, 0)            /* -1: all streams stop, N: the Nth that the process made, 0: none */ \
    X(hang_gpu, 0)        /* N: all streams of the Nth GPU stop, 0: of none */ \
    X(batch_most, 0)      /* a batch of more copies is refused with error 1; 0: no limit */ \
    X(fabric, 0)          /* memory may be created with handles for a fabric */ \
    X(lose, 0)            /* a sticky error for the next process that sees it: set to 0 then */

/* What the process has, in the same table; `refusals` counts what was refused as undefined. */
#define COUNTS(X) \
    X(contexts) X(allocations) X(opened) X(pinned) X(streams) X(events) X(modules) \
    X(reservations) X(mappings) X(handles) X(refusals)

/* Functions of the driver. Of each the table has how often it was called; how it is to fail, with
 * `code`, `times` times (0: for ever), the first time at the `at`-th call from now; how many
 * microseconds a call takes beside; and that calls `hang`, which return when that is 0 again. */
#define CALLS(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) \
    X(cuDeviceGetUuid_v2) X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain) \
    X(cuDevicePrimaryCtxRelease_v2) X(cuCtxSetCurrent) X(cuCtxGetCurrent) X(cuCtxGetDevice) \
    X(cuCtxSynchronize) X(cuMemGetInfo_v2) X(cuMemAlloc_v2) X(cuMemFree_v2) \
    X(cuMemGetAddressRange_v2) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemHostRegister_v2) \
    X(cuMemHostUnregister) X(cuMemHostGetDevicePointer_v2) X(cuIpcGetMemHandle) \
    X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle) X(cuStreamCreate) X(cuStreamDestroy_v2) \
    X(cuStreamSynchronize) X(cuStreamWriteValue64_v2) X(cuEventCreate) X(cuEventRecord) \
    X(cuEventQuery) X(cuEventSynchronize) X(cuEventDestroy_v2) X(cuMemcpyHtoD_v2) \
    X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2) X(cuMemcpyBatchAsync) X(cuModuleLoadData) \
    X(cuModuleGetFunction) X(cuLaunchKernel) X(cuMemCreate) X(cuMemRetainAllocationHandle) \
    X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) X(cuMemRelease) \
    X(cuMemGetAllocationPropertiesFromHandle) X(cuMemAddressReserve) X(cuMemAddressFree) \
    X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)

enum {
#define NAME(name, ...) SET_##name,
    SETTINGS(NAME)
#undef NAME
#define NAME(name) COUNT_##name,
    COUNTS(NAME)
#undef NAME
    FIRST_CALL
};
enum {
#define NAME(name) CALL_##name,
    CALLS(NAME)
#undef NAME
    CALL_COUNT
};
enum { CALLED, CODE, AT, TIMES, TAKES_US, HANG, CALL_FIELDS };
#define SLOTS (FIRST_CALL + CALL_COUNT * CALL_FIELDS)
#define MAX_DEVICES 16

/* settings.c */
_Atomic int64_t *stub_table(void);
#define SETTING(name) (stub_table()[SET_##name])
#define COUNT(name) (stub_table()[COUNT_##name])
Result stub_enter(int call, bool needs_context);
#define ENTER(name) ENTER_(name, true)
#define ENTER_WITHOUT_CONTEXT(name) ENTER_(name, false)
#define ENTER_(name, needs) \
    do { \
        const Result entered = stub_enter(CALL_##name, needs); \
        if (entered) { \
            return entered; \
        } \
    } while (0)
/* Says why and returns `code`. */
Result stub_refuse(Result code, const char *format, ...) __attribute__((format(printf, 2, 3)));
Result stub_lost(void); /* The sticky error of this process, or 0. */
void stub_lose(Result code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void stub_forget_loss(void);
void stub_nap(uint64_t us);
typedef struct {
    uint64_t state;
} Random;
Random stub_random(uint64_t salt);
uint64_t stub_below(Random *random, uint64_t bound); /* 0 if the bound is. */
uint64_t stub_any(uint64_t bound);                   /* Of this thread. */

/* devices.c */
typedef struct Stream Stream;
typedef struct {
    int device;
    int retained;
    Stream *legacy; /* The default stream, from its first use on. */
} Context;
bool stub_initialized(void);
Context *stub_context(void); /* Of this thread, or NULL. */
int stub_device_of(const uint8_t uuid[16]); /* -1: not visible to this process. */
bool stub_is_ordinal(int device);
const uint8_t *stub_uuid(int device);
void stub_forget_devices(void);

/* memory.c */
typedef enum { ALLOCATED, OPENED, MAPPED, PINNED, REGISTERED } Kind;
typedef struct Region {
    Address base;
    size_t size;
    Kind kind;
    int device;
    bool everywhere;  /* Pinned for each context. */
    bool device_map;  /* Registered with a device pointer. */
    bool readable, writable;
    int fd;           /* -1: not a memfd. */
    ino_t inode;
    int references;   /* Of OPENED. */
    bool exported;    /* ALLOCATED, and another process may open it. */
    void *owner;      /* The handle of MAPPED, the block of a small one of ALLOCATED. */
    struct Region *next;
} Region;
/* At the end of a memfd, on a page of its own. */
typedef struct {
    uint64_t magic;
    uint64_t size;
    uint8_t uuid[16];
    bool exportable;
    _Atomic int openers[256]; /* The processes that have it open. */
} Trailer;
#define PAGE_BYTES ((Address)4096)
#define FRESH_BYTE 0xDB
#define FREED_BYTE 0xDD
#define TRAILER_BYTES 4096
#define TRAILER_MAGIC 0x6375646173747562u
#define DISTINCT_OFFSET (1ull << 52)
/* Smaller allocations are parts of such a block, and a handle of one opens the whole block. */
#define BLOCK_BYTES ((size_t)2 << 20)
#define ALIGNED_BYTES 512

extern pthread_rwlock_t stub_memory_lock; /* Of the list. A piece of a copy holds it to read. */
size_t stub_whole_pages(size_t size);
Region *stub_add_region(Region region);
void stub_remove_region(Region *region);
Region *stub_region_at(Address base, Kind kind);
Region *stub_region_of(Address address);
Region *stub_opened(ino_t inode); /* What is open of another process. */
Region *stub_overlap(Address address, size_t size); /* Any region of a range, or NULL. */
bool stub_is_device(const Region *region);
/* The memory at an address of the GPU, NULL unless all of it may be accessed: held to read. */
char *stub_reach(Address address, size_t size, bool to_write);
/* The same, faster where `near`, which is NULL at first, is the last region that was reached. */
char *stub_reach_near(Address address, size_t size, bool to_write, const Region **near);
/* As `stub_reach`, for a copy, which also takes addresses of the host. */
char *stub_reach_for_copy(Address address, size_t size, bool to_write);
int stub_new_memory(size_t size, int device, bool exportable);
Trailer *stub_trailer(int fd); /* NULL: not such a memfd. */
size_t stub_used(int device);
void stub_note_opener(int fd, int before, int after);
int stub_opener_of(int fd); /* A process that has an allocation open, or 0. */
void stub_forget_memory(int device);
/* host.c: whether all pages of a range belong to the process. */
bool stub_is_in_process(Address address, size_t size);

/* streams.c */
typedef struct Operation {
    void (*run)(Stream *stream, struct Operation *operation);
    void (*end)(struct Operation *operation); /* Frees what it has; NULL: nothing. */
    uint64_t numbers[9];
    void *data;
    struct Operation *next;
} Operation;
Stream *stub_stream(void *handle); /* NULL, after a refusal: no stream. */
Context *stub_stream_context(const Stream *stream);
bool stub_is_legacy(const Stream *stream);
Random *stub_stream_random(Stream *stream);
/* Enqueues; the place of the operation. The stream takes what `operation` has. */
uint64_t stub_enqueue(Stream *stream, Operation operation);
Result stub_wait(Stream *stream, uint64_t place);
bool stub_has_reached(Stream *stream, uint64_t place);
uint64_t stub_last_place(Stream *stream);
Result stub_wait_for_device(int device);
void stub_pause(Stream *stream); /* At random; and as long as the stream hangs. */
void stub_end_streams(int device); /* -1: of all. */

/* events.c, kernels.c, vmm.c: as if there were none. -1: of no GPU. */
void stub_forget_events(int device);
void stub_forget_modules(int device);
void stub_forget_handles(void);
#endif
