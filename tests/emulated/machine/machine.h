// What the emulated parts of CUDA ask of the machine that runs them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace machine {

// Where a thread waits, for whoever asks why nothing goes on.
struct Site {
    const char* what;
    const char* file;
    int line;
};

struct Index {
    unsigned x, y, z;
};

// This thread in its block, its block in the launch, and how many blocks there are.
const Index& thread_index();
const Index& block_index();
const Index& block_count();
unsigned block_threads();

// Stops the launch: the driver's call fails with this text.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// Another thread's turn, until a condition holds. Engines may do something of what they were asked in between.
void wait(const Site& site, bool (*holds)(const void*), const void* condition);

// Something has happened that others may have waited for.
void progress();

// Its warp may miss many turns from now on, as one that others left behind.
void linger();

// Waits until a condition holds: of what was ready already, until its next turn.
template <class Condition>
inline void until(const Site& site, Condition holds) {
    wait(site, [](const void* condition) { return (*static_cast<const Condition*>(condition))(); }, &holds);
    progress();
}

// Tells 32 bits to the lanes of the warp, all of which have to come to the same place; what each of them told.
const uint32_t* tell(uint32_t bits, const Site& site);

// Meets the lanes of the warp: what one of them stored before is there for whoever meets any of them at a barrier.
void meet_lanes(const Site& site);

// The same of several words, of which the lane that comes last makes results for all, before anybody goes on.
constexpr unsigned WORDS = 12;
constexpr unsigned RESULTS = 128;
const float* tell_all(const uint32_t* words, unsigned count, void (*make)(const uint32_t (*all)[WORDS], float* results), const Site& site);

// A barrier of the block that has a number: comes to it, and waits for so many threads or not.
void come(unsigned barrier, unsigned threads, bool waits, const Site& site);

// Shared memory of the block, by the addresses that kernels have.
unsigned char* shared(uint32_t at, size_t bytes, const char* what);
void store(uint32_t at, const void* from, size_t bytes);
void load(uint32_t at, void* to, size_t bytes);
// What this thread stored may be read by engines.
void publish();

// Barriers in shared memory.
void barrier_init(uint32_t at, uint32_t arrivals);
void barrier_arrive(uint32_t at, uint32_t bytes);
void barrier_wait(uint32_t at, uint32_t parity, const Site& site);

// Of blocks that run together: which of them this one is, stores and arrivals in another's shared memory, boxes of tensors to all
// of them, bytes in a row to the same place of another, and all threads of all.
unsigned rank();
void store_in_pair(uint32_t at, unsigned rank, uint32_t word);
void barrier_arrive_in_pair(uint32_t at, unsigned rank);
void copy_in_pair(uint32_t to, const uint64_t* map, uint32_t barrier, const int (&place)[4]);
void copy_to_peer(uint32_t at, uint32_t bytes, uint32_t barrier, unsigned rank);
void meet_in_pair(const Site& site);

// Boxes of tensors to shared memory and out of it, whenever the copy engine comes to them.
void copy_in(uint32_t to, const uint64_t* map, uint32_t barrier, const int (&place)[4]);
void copy_row_in(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void nothing_in(uint32_t to, uint32_t bytes, uint32_t barrier);
void copy_out(uint32_t from, const uint64_t* map, const int (&place)[4]);
// Bytes in a row, in place of those in memory or, f32 or 32-bit integers, added to them.
enum class Adds { Nothing, Floats, Integers };
void row_out(void* to, uint32_t from, uint32_t bytes, Adds adds);
void copy_out_ends();
// What this thread took out has been read, but for so many groups; has come to where it goes, as far as rows go.
void copied_out(size_t left, const Site& site);
void arrived_out(const Site& site);

// Copies of 16 bytes to shared memory that threads ask for, `bytes` of them of memory and zeros behind: there for the thread that asked once it waited for their
// group, and for others once that thread came to a barrier.
void copy_16(uint32_t to, const void* from, uint32_t bytes);
void copies_commit();
void copies_wait(size_t groups);

// A product of 64 rows by `columns` over 16, which the matrix units do whenever they come to it, once all four warps of the group asked.
struct Product {
    float* results;
    int columns;
    bool add;
    // The first operand in registers, or where it lies in shared memory.
    bool registers;
    uint32_t a[4];
    uint64_t a_at;
    bool a_by_columns;
    uint64_t b_at;
    bool b_by_columns;
    float (*widen)(uint16_t);
};
void multiply(const Product& product);
void multiply_begin();
void multiply_ends();
void multiplied(int groups, const Site& site);

// Whether registers of a group may become so many, of all that the block has.
void registers(int count, bool more);

}  // namespace machine

#define HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
