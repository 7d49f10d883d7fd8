// Runs a dispatch: a fiber for each thread, threadgroups one after the other. Reads a job from a file and writes what it computed.
//
// Lanes of a simdgroup take turns from meeting to meeting; when the last one comes, all must stand at the same place. Simdgroups take
// turns from barrier to barrier, in an order that changes. Threadgroup memory is all ones before each threadgroup: NaN in every type.
// Every buffer ends where a page that cannot be read begins, and what a kernel only reads cannot be written.

#include "machine.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define UNPOISON(at, bytes) __asan_unpoison_memory_region(at, bytes)
#endif
#endif
#ifndef UNPOISON
#define UNPOISON(at, bytes) (void)0
#endif

#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define UNKNOWN(at, bytes) __msan_poison(at, bytes)
#else
#define UNKNOWN(at, bytes) (void)0
#endif

// Threads, to the sanitizer for races: a fiber of its own for each, without an order between them but by barriers. This file is not
// instrumented then, so that what it does for the threads is no access of theirs.
#if defined(CHECK_RACES)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
#endif

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64"
#endif

// Saves the callee's registers and the stack, and takes up those of another fiber.
extern "C" void switch_stacks(void** save, void* load);
asm(R"(
.text
.globl switch_stacks
.type switch_stacks, @function
switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size switch_stacks, .-switch_stacks
)");

namespace {

constexpr int MOST_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t THREADGROUP_LIMIT = 32 * 1024;

enum class Stop { RUNNING, MEETING, BARRIER, END };

struct Fiber {
    void* stack = nullptr;
    void* saved = nullptr;
    void* shadow = nullptr;
    Stop stop = Stop::RUNNING;
    machine::Site site = {nullptr, nullptr, 0};
    machine::Thread self = {};
};

struct Area {
    char* begin;
    size_t bytes;
    bool written;
    char name[24];
};

Fiber fibers[MOST_THREADS];
alignas(16) unsigned char boards[MOST_THREADS / machine::SIMD][2][machine::BOARD_BYTES];
bool halves[MOST_THREADS];
void* scheduler;
void* scheduler_shadow;
#if defined(CHECK_RACES)
// The end of the dispatch: what all threads did is done then.
char dispatched;
#endif
int now;
int n_threads;
void* buffers[32];
void* tiles[32];
Area areas[64];
int n_areas;

size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }

size_t whole_pages(size_t bytes) { return (bytes + page() - 1) / page() * page(); }

// Memory whose end is followed by a page that nothing may touch; another lies before the page of its begin.
char* mapped(size_t bytes) {
    const size_t whole = whole_pages(bytes);
    char* all = static_cast<char*>(mmap(nullptr, whole + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (all == MAP_FAILED || (whole > 0 && mprotect(all + page(), whole, PROT_READ | PROT_WRITE) != 0)) {
        machine::fail("no memory: %s", strerror(errno));
    }
    return all + page() + whole - bytes;
}

#if defined(CHECK_RACES)
void release(void* begin, size_t bytes) {
    const size_t whole = whole_pages(bytes);
    munmap(static_cast<char*>(begin) + bytes - whole - page(), whole + 2 * page());
}
#endif

// Sets every bit, and what lies before on the first page; by hand, as the sanitizer for races would take a library's for an access.
void fill(char* begin, size_t bytes) {
    volatile char* at = begin + bytes - whole_pages(bytes);
    for (size_t n = whole_pages(bytes); n > 0; n--) {
        *at++ = char(0xff);
    }
    UNKNOWN(begin, bytes);
}

char* guarded(size_t bytes, const char* name, int n, bool written) {
    char* begin = mapped(bytes);
    fill(begin, bytes);
    Area& area = areas[n_areas++];
    area = {begin, bytes, written, {}};
    snprintf(area.name, sizeof area.name, "%s %d", name, n);
    return begin;
}

void protect(char* begin, size_t bytes) {
    const uintptr_t first = uintptr_t(begin) / page() * page();
    if (bytes > 0) {
        mprotect(reinterpret_cast<void*>(first), uintptr_t(begin) + bytes - first, PROT_READ);
    }
}

const char* where(const Fiber& fiber) {
    static char text[4][160];
    static int turn;
    char* to = text[turn++ % 4];
    if (fiber.stop == Stop::END) {
        snprintf(to, sizeof text[0], "the end");
    } else if (fiber.site.what == nullptr) {
        snprintf(to, sizeof text[0], "the begin");
    } else {
        snprintf(to, sizeof text[0], "%s at %s:%d", fiber.site.what, fiber.site.file, fiber.site.line);
    }
    return to;
}

// Texts are mostly at one place.
bool same(const char* x, const char* y) { return x == y || strcmp(x, y) == 0; }

bool same(const Fiber& x, const Fiber& y) {
    return x.stop == y.stop
        && (x.stop == Stop::END || (x.site.line == y.site.line && same(x.site.what, y.site.what) && same(x.site.file, y.site.file)));
}

// What is done by the one that leaves is not known to the other; only the first switch to a fiber tells it what was before.
void announce(void* shadow, bool tell) {
#if defined(CHECK_RACES)
    __tsan_switch_to_fiber(shadow, tell ? 0 : 1);
#else
    (void)shadow;
    (void)tell;
#endif
}

void turn_to(int next) {
    void** save = &fibers[now].saved;
    const bool first = fibers[next].stop == Stop::RUNNING;
    now = next;
    announce(fibers[next].shadow, first);
    switch_stacks(save, fibers[next].saved);
}

void to_scheduler() {
    void** save = &fibers[now].saved;
    announce(scheduler_shadow, false);
    switch_stacks(save, scheduler);
}

void from_scheduler(int next) {
    now = next;
    announce(fibers[next].shadow, fibers[next].stop == Stop::RUNNING);
    switch_stacks(&scheduler, fibers[next].saved);
}

// This lane has come to a stop: the next one's turn, or the next step when it is the last.
void come(Stop stop, const char* what, const char* file, int line) {
    Fiber& self = fibers[now];
    self.stop = stop;
    self.site = {what, file, line};
    const int first = now / machine::SIMD * machine::SIMD;
    if (now != first + machine::SIMD - 1) {
        turn_to(now + 1);
        return;
    }
    for (int lane = 1; lane < machine::SIMD; lane++) {
        if (!same(fibers[first], fibers[first + lane])) {
            machine::fail(
                "the lanes of simdgroup %d part: lane 0 is at %s, lane %d at %s", first / machine::SIMD, where(fibers[first]), lane,
                where(fibers[first + lane]));
        }
    }
    if (stop == Stop::MEETING) {
        turn_to(first);
    } else {
        to_scheduler();
    }
}

void begin_fiber() {
    run_thread(buffers, tiles, fibers[now].self);
#if defined(CHECK_RACES)
    __tsan_release(&dispatched);
#endif
    come(Stop::END, "", "", 0);
    machine::fail("a thread went on after its end");
}

void reset(int index, const unsigned group[3]) {
    Fiber& fiber = fibers[index];
#if defined(CHECK_RACES)
    // Memory that no earlier threadgroup has used: it is another's, and there is no order between the two.
    if (fiber.stack != nullptr) {
        release(fiber.stack, STACK_BYTES);
        __tsan_destroy_fiber(fiber.shadow);
        fiber.stack = nullptr;
    }
    fiber.shadow = __tsan_create_fiber(0);
#endif
    if (fiber.stack == nullptr) {
        fiber.stack = mapped(STACK_BYTES);
    }
    UNPOISON(fiber.stack, STACK_BYTES);
    // Calls leave the stack eight bytes off a multiple of sixteen.
    void** top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(begin_fiber);
    for (int n = 0; n < 6; n++) {
        *--top = nullptr;
    }
    fiber.saved = top;
    fiber.stop = Stop::RUNNING;
    fiber.site = {nullptr, nullptr, 0};
    const unsigned at = unsigned(index);
    fiber.self = {{group[0], group[1], group[2]}, at, at / machine::SIMD, at % machine::SIMD};
}

uint64_t random_state;

uint64_t random_bits() {
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void shuffle(int* order, int n) {
    for (int i = 0; i < n; i++) {
        order[i] = i;
    }
    for (int i = n - 1; i > 0; i--) {
        const int j = int(random_bits() % uint64_t(i + 1));
        const int kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

void run_group(const unsigned group[3]) {
    const int n_simd = n_threads / machine::SIMD;
    for (int n = 0; n < n_threads; n++) {
        reset(n, group);
    }
    int order[MOST_THREADS / machine::SIMD];
    do {
        shuffle(order, n_simd);
        for (int i = 0; i < n_simd; i++) {
            from_scheduler(order[i] * machine::SIMD);
        }
        for (int i = 1; i < n_simd; i++) {
            if (!same(fibers[0], fibers[i * machine::SIMD])) {
                machine::fail(
                    "the simdgroups part: 0 is at %s, %d at %s", where(fibers[0]), i, where(fibers[i * machine::SIMD]));
            }
        }
    } while (fibers[0].stop != Stop::END);
}

void crashed(int signal, siginfo_t* info, void*) {
    const char* at = static_cast<const char*>(info->si_addr);
    for (int n = 0; n < n_areas; n++) {
        const Area& area = areas[n];
        const char* reach = area.begin + area.bytes + page();
        if (at >= area.begin - page() && at < reach) {
            const long past = long(at - area.begin) - long(area.bytes);
            const Fiber& f = fibers[now];
            fprintf(
                stderr, "emulator: %s of %zu bytes is touched %ld bytes %s; threadgroup %u %u %u, thread %u, after %s\n", area.name,
                area.bytes, past >= 0 ? past : past + long(area.bytes),
                past >= 0 ? "past its end" : "from its begin, and may not be written there", f.self.group[0], f.self.group[1],
                f.self.group[2], f.self.index, where(f));
            _exit(3);
        }
    }
    fprintf(stderr, "emulator: signal %d at %p\n", signal, info->si_addr);
    _exit(3);
}

void catch_crashes() {
    static char alternate[64 * 1024];
    stack_t stack = {};
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = crashed;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

void read_bytes(FILE* from, void* to, size_t bytes) {
    if (bytes > 0 && fread(to, 1, bytes, from) != bytes) {
        machine::fail("the job ends early");
    }
}

uint64_t read_number(FILE* from) {
    uint64_t x;
    read_bytes(from, &x, sizeof x);
    return x;
}

}  // namespace

namespace machine {

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    _exit(2);
}

void meet(const char* what, const char* file, int line) { come(Stop::MEETING, what, file, line); }
void barrier(const char* file, int line, bool orders) {
    const char* what = "threadgroup_barrier";
#if defined(CHECK_RACES)
    // Two in turn: whoever has passed one may come to the next before others have passed the first.
    static char barriers[2];
    static bool turns[MOST_THREADS];
    void* at = &barriers[turns[now] ^= true];
    if (orders) {
        __tsan_release(at);
    }
    come(Stop::BARRIER, what, file, line);
    if (orders) {
        __tsan_acquire(at);
    }
#else
    (void)orders;
    come(Stop::BARRIER, what, file, line);
#endif
}
int lane() { return now % SIMD; }

unsigned char* board(bool advance) {
    halves[now] ^= advance;
    return boards[now / SIMD][halves[now]];
}

}  // namespace machine

// JOB RESULT. A job is 64-bit numbers: grid (3), threads, seed, tiles, bytes of each; buffers, and for each whether it is written, its
// bytes and its contents. The result has the contents of those that are written.
int main(int n, char** arguments) {
    if (n != 3) {
        machine::fail("usage: JOB RESULT");
    }
    FILE* job = fopen(arguments[1], "rb");
    if (job == nullptr) {
        machine::fail("%s: %s", arguments[1], strerror(errno));
    }
    unsigned grid[3];
    for (unsigned& extent : grid) {
        extent = unsigned(read_number(job));
    }
    n_threads = int(read_number(job));
    if (n_threads < machine::SIMD || n_threads > MOST_THREADS || n_threads % machine::SIMD != 0) {
        machine::fail("%d threads: a threadgroup has 32 to 1024, whole simdgroups", n_threads);
    }
    random_state = read_number(job);
    const int n_tiles = int(read_number(job));
    size_t tile_bytes[32] = {};
    size_t total = 0;
    for (int t = 0; t < n_tiles; t++) {
        tile_bytes[t] = read_number(job);
        total += (tile_bytes[t] + 15) / 16 * 16;
        tiles[t] = guarded(tile_bytes[t], "threadgroup memory", t, true);
    }
    if (total > THREADGROUP_LIMIT) {
        machine::fail("%zu bytes of threadgroup memory: %zu is the limit", total, THREADGROUP_LIMIT);
    }
    const int n_buffers = int(read_number(job));
    const int first_buffer = n_areas;
    for (int b = 0; b < n_buffers; b++) {
        const bool written = read_number(job) != 0;
        const size_t bytes = read_number(job);
        char* begin = guarded(bytes, "buffer", b, written);
        read_bytes(job, begin, bytes);
        if (!written) {
            protect(begin, bytes);
        }
        buffers[b] = begin;
    }
    fclose(job);
    catch_crashes();
#if defined(CHECK_RACES)
    scheduler_shadow = __tsan_get_current_fiber();
#endif

    const int groups = int(grid[0] * grid[1] * grid[2]);
    int* order = static_cast<int*>(malloc(sizeof(int) * size_t(groups)));
    shuffle(order, groups);
    for (int g = 0; g < groups; g++) {
        for (int t = 0; t < n_tiles; t++) {
#if defined(CHECK_RACES)
            release(tiles[t], tile_bytes[t]);
            tiles[t] = mapped(tile_bytes[t]);
            areas[t].begin = static_cast<char*>(tiles[t]);
#endif
            fill(static_cast<char*>(tiles[t]), tile_bytes[t]);
        }
        const unsigned at = unsigned(order[g]);
        const unsigned group[3] = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        run_group(group);
    }
    free(order);
#if defined(CHECK_RACES)
    __tsan_acquire(&dispatched);
#endif

    for (int n = 0; n < n_areas; n++) {
        const size_t slack = whole_pages(areas[n].bytes) - areas[n].bytes;
        for (size_t before = 1; before <= slack; before++) {
            if (areas[n].begin[-ptrdiff_t(before)] != char(0xff)) {
                machine::fail("%s was written %zu bytes before its begin", areas[n].name, before);
            }
        }
    }

    FILE* result = fopen(arguments[2], "wb");
    if (result == nullptr) {
        machine::fail("%s: %s", arguments[2], strerror(errno));
    }
    for (int b = 0; b < n_buffers; b++) {
        const Area& area = areas[first_buffer + b];
        if (area.written && area.bytes > 0) {
            fwrite(area.begin, 1, area.bytes, result);
        }
    }
    if (fclose(result) != 0) {
        machine::fail("%s: %s", arguments[2], strerror(errno));
    }
    return 0;
}
