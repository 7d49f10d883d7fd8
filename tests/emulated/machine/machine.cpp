// Runs a launch: a fiber for each thread, some blocks side by side, turns in an order that changes.
//
// What engines are asked for, copies and products, they do whenever they come to it: between any two turns, or many turns later. Warps miss turns. Until a product is
// done its results are NaN; operands are read when it is done, so what was overwritten in between is seen. Shared memory begins as all ones, and what a
// thread stored is kept from engines until the thread has published it.

#include "machine.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>

extern "C" void switch_stacks(void** save, void* load);
asm(R"(
.text
.globl switch_stacks
.hidden switch_stacks
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

using machine::Index;
using machine::Site;

constexpr unsigned WARP = 32, GROUP = 128;
constexpr size_t STACK_BYTES = 128 << 10;
// Blocks that run side by side, as on so many multiprocessors.
constexpr size_t RESIDENT = 3;
// Registers of a multiprocessor.
constexpr int REGISTERS = 65536;

struct Block;

struct Range {
    uint32_t at;
    size_t bytes;
};

// A copy of 16 bytes, and whether it is still to be done.
struct Sixteen {
    uint32_t to;
    const void* from;
    uint32_t bytes;
    bool waits;
};

struct Fiber {
    char* stack = nullptr;
    void* saved = nullptr;
    Block* block = nullptr;
    Index index = {};
    unsigned number = 0;
    bool ended = false;
    Site site = {"the begin", "", 0};
    // What it waits for, if it waits: asked from outside, since most turns of most threads come too early.
    bool (*holds)(const void*) = nullptr;
    const void* condition = nullptr;
    std::vector<Range> unpublished;
    // How many copies out are under way: of no group yet, and of each group.
    std::shared_ptr<int> open = std::make_shared<int>(0);
    std::vector<std::shared_ptr<int>> under_way;
    // How many rows were taken out and are not there yet.
    std::shared_ptr<int> unwritten = std::make_shared<int>(0);
    // Products asked for, and how many at the end of each group.
    uint64_t asked = 0;
    bool begun = false;
    std::deque<uint64_t> groups;
    uint64_t told = 0;
    // Copies of 16 bytes that it asked for: of no group yet, of each group, and those that it waited for and no barrier followed.
    std::vector<Sixteen> asked_16;
    std::deque<std::vector<Sixteen>> groups_16;
    std::vector<uint32_t> came_16;
    // Words that it stored, and no barrier followed.
    std::vector<uint32_t> stored;
};

struct Warp {
    // Turns that it misses.
    unsigned late = 0;
    uint32_t board[2][WARP];
    uint32_t words[2][WARP][machine::WORDS];
    float results[2][machine::RESULTS];
    Site sites[2][WARP];
    uint64_t came[2] = {};
};

struct Numbered {
    unsigned threads = 0, came = 0;
    uint64_t round = 0;
};

struct Barrier {
    uint32_t arrivals, left;
    int64_t bytes;
    uint64_t phase;
};

struct Copy {
    bool in;
    uint32_t shared, barrier;
    uint64_t map[16];
    int place[4];
    // Of a copy out: what counts those of its group.
    std::shared_ptr<int> group;
    // Of bytes in a row: where they come from, or go to, and how many there are.
    void* row;
    uint32_t bytes;
    // Turns until the engine thinks of it, if it is one that takes long.
    unsigned later;
    // Whether numbers are added to those in memory; and what counts those of the thread that are not there yet.
    bool adds = false;
    std::shared_ptr<int> unwritten = nullptr;
};

// Bytes that were read from shared memory, and are not where they go.
struct Write {
    void* to;
    std::vector<float> numbers;
    bool adds;
    std::shared_ptr<int> unwritten;
    unsigned later;
};

// What a thread of a group asked of a product.
struct Asked {
    machine::Product of[GROUP];
    unsigned count = 0;
};

struct Group {
    std::deque<Asked> waiting;
    // Products that are done.
    uint64_t done = 0;
};

struct Block {
    Index index;
    unsigned threads;
    std::vector<unsigned char> shared;
    // Of each byte of shared memory, the thread that stored it and did not publish it, plus one.
    std::vector<uint16_t> owner;
    // Of every 16 bytes of it, the thread whose copy to them is under way, plus one; with the highest bit where that thread has waited for it.
    std::vector<uint16_t> flight;
    // Of every word, the thread that stored it and came to no barrier since, plus one.
    std::vector<uint16_t> fresh;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    std::map<unsigned, Numbered> numbered;
    std::map<uint32_t, Barrier> barriers;
    std::vector<Copy> copies;
    std::vector<Write> writes;
    std::vector<Group> groups;
    std::vector<int> registers;
    size_t live;
};

Fiber* now;
void* scheduler;
bool went_on;
bool failed;
char* failure;
size_t failure_bytes;
// Boxes and copies of 16 bytes that came in.
uint64_t brought;
// Whether bytes lie in an allocation.
bool (*holds)(uint64_t, uint64_t);
// Whether a thread has its turn.
bool inside;
Index grid;
void (*entry)(void**);
void** arguments;
std::vector<char*> stacks;
uint64_t random_state;

uint64_t random_bits() {
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// One in so many comes so many turns late at most.
unsigned lateness(unsigned one_in, unsigned most) { return random_bits() % one_in == 0 ? unsigned(random_bits() % most) : 0; }

void told(const char* format, va_list list) {
    if (!failed) {
        vsnprintf(failure, failure_bytes, format, list);
        failed = true;
    }
}

// Outside of threads.
__attribute__((format(printf, 1, 2))) void note(const char* format, ...) {
    va_list list;
    va_start(list, format);
    told(format, list);
    va_end(list);
}

void to_scheduler() {
    inside = false;
    switch_stacks(&now->saved, scheduler);
}

void begin_fiber() {
    entry(arguments);
    Fiber& self = *now;
    if (*self.open > 0) note("thread %u ends before its copies are a group", self.number);
    for (const auto& left : self.under_way) {
        if (*left > 0) note("thread %u ends before shared memory was read by the copy engine", self.number);
    }
    const uint64_t done = self.block->groups.empty() ? 0 : self.block->groups[self.number / GROUP].done;
    if (self.asked > done) note("thread %u ends before its products", self.number);
    bool waits = !self.asked_16.empty();
    for (const auto& group : self.groups_16) waits |= !group.empty();
    if (waits) note("thread %u ends before its copies were waited for", self.number);
    self.ended = true;
    went_on = true;
    self.site = {"the end", "", 0};
    to_scheduler();
}

char* stack() {
    if (!stacks.empty()) {
        char* last = stacks.back();
        stacks.pop_back();
        return last;
    }
    void* made = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED || mprotect(made, 4096, PROT_NONE) != 0) {
        perror("a thread's stack");
        abort();
    }
    return static_cast<char*>(made);
}

std::unique_ptr<Block> begin_block(Index index, unsigned threads, unsigned shared_bytes) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->threads = threads;
    block->shared.assign(shared_bytes, 0xff);
    block->owner.assign(shared_bytes, 0);
    block->flight.assign(shared_bytes / 16 + 1, 0);
    block->fresh.assign(shared_bytes / 4 + 1, 0);
    block->warps.resize((threads + WARP - 1) / WARP);
    block->groups.resize(threads / GROUP);
    block->registers.assign(threads / GROUP, 0);
    block->live = threads;
    for (unsigned n = 0; n < threads; n++) {
        Fiber* fiber = new Fiber;
        fiber->stack = stack();
        fiber->block = block.get();
        fiber->index = {n, 0, 0};
        fiber->number = n;
        void** top = reinterpret_cast<void**>(fiber->stack + STACK_BYTES);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(begin_fiber);
        for (int at = 0; at < 6; at++) *--top = nullptr;
        fiber->saved = top;
        block->fibers.push_back(fiber);
    }
    return block;
}

void end_block(Block& block) {
    if (!failed && !block.copies.empty()) note("a block ends before its copies");
    for (Fiber* fiber : block.fibers) {
        stacks.push_back(fiber->stack);
        delete fiber;
    }
}

uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

void published(Block& block, uint32_t at, size_t bytes, const char* what) {
    for (size_t n = 0; n < bytes; n++) {
        if (block.owner[at + n] != 0) {
            note("%s reads shared memory at %u, which thread %u stored and did not publish", what, unsigned(at + n), block.owner[at + n] - 1u);
            return;
        }
    }
}

bool fits(const Block& block, uint32_t at, size_t bytes, const char* what) {
    if (at + bytes > block.shared.size()) {
        note("%s: shared memory at %u, of %zu bytes", what, at, block.shared.size());
        return false;
    }
    return true;
}

void advance(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes == 0) {
        barrier.left = barrier.arrivals;
        barrier.phase++;
    }
}

// A map of a tensor, as the emulated driver encodes it.
struct Map {
    char* address;
    int64_t extents[4], strides[4];
    uint32_t box[4];
    explicit Map(const uint64_t* words) {
        address = reinterpret_cast<char*>(words[0]);
        strides[0] = 2;
        for (int axis = 0; axis < 4; axis++) extents[axis] = int64_t(words[1 + axis]), box[axis] = uint32_t(words[8 + axis]);
        for (int axis = 0; axis < 3; axis++) strides[axis + 1] = int64_t(words[5 + axis]);
    }
    // Whether nothing of a box is inside: then the copy engine looks at the begin of the map.
    bool outside(const int (&place)[4]) const {
        for (int axis = 0; axis < 4; axis++) {
            if (place[axis] >= extents[axis] || int64_t(place[axis]) + box[axis] <= 0) return true;
        }
        return false;
    }
    // Of a row of a box, its first element; nothing where the row is outside.
    char* row(const int (&place)[4], uint32_t row) const {
        const int64_t at[3] = {place[1] + int64_t(row % box[1]), place[2] + int64_t(row / box[1]), place[3]};
        char* to = address;
        for (int axis = 0; axis < 3; axis++) {
            if (at[axis] < 0 || at[axis] >= extents[axis + 1]) return nullptr;
            to += at[axis] * strides[axis + 1];
        }
        return to;
    }
};

// Bytes have come to shared memory.
void came_in(Block& block, const Copy& copy, size_t bytes) {
    memset(&block.owner[copy.shared], 0, bytes * sizeof(uint16_t));
    auto found = block.barriers.find(copy.barrier);
    if (found == block.barriers.end()) return note("a copy arrives at %u, where no barrier is", copy.barrier);
    found->second.bytes -= int64_t(bytes);
    advance(found->second);
}

void run(Block& block, const Copy& copy) {
    if (copy.row != nullptr) {
        if (copy.bytes % 16 != 0 || copy.shared % 16 != 0 || uintptr_t(copy.row) % 16 != 0) return note("%u bytes in a row to %u", copy.bytes, copy.shared);
        if (!fits(block, copy.shared, copy.bytes, "a copy")) return;
        if (copy.in) {
            memcpy(&block.shared[copy.shared], copy.row, copy.bytes);
            return came_in(block, copy, copy.bytes);
        }
        published(block, copy.shared, copy.bytes, "the copy engine");
        Write write = {copy.row, std::vector<float>(copy.bytes / 4), copy.adds, copy.unwritten, lateness(8, 4000)};
        memcpy(write.numbers.data(), &block.shared[copy.shared], copy.bytes);
        block.writes.push_back(std::move(write));
        --*copy.group;
        return;
    }
    const Map map(copy.map);
    if (map.outside(copy.place) && !holds(uint64_t(map.address), 2)) return note("a box of nothing, of a map that begins at %p, where no memory is", map.address);
    const uint32_t rows = map.box[1] * map.box[2], columns = map.box[0];
    const size_t bytes = size_t(rows) * 128;
    if (copy.shared % 128 != 0 || columns != 64 || map.box[3] != 1) {
        return note("a box of %u by %u at %u of shared memory", rows, columns, copy.shared);
    }
    if (!fits(block, copy.shared, bytes, "a copy")) return;
    if (!copy.in) published(block, copy.shared, bytes, "the copy engine");
    for (uint32_t row = 0; row < rows; row++) {
        char* outside = map.row(copy.place, row);
        if (outside != nullptr && !holds(uint64_t(outside), uint64_t(map.extents[0]) * 2)) return note("a row of a box at %p, which no allocation has", outside);
        for (uint32_t column = 0; column < columns; column++) {
            unsigned char* inside = &block.shared[swizzled(copy.shared + row * 128 + column * 2)];
            const int64_t at = copy.place[0] + int64_t(column);
            char* element = outside != nullptr && at >= 0 && at < map.extents[0] ? outside + at * 2 : nullptr;
            if (!copy.in) {
                if (element != nullptr) memcpy(element, inside, 2);
            } else if (element != nullptr) {
                memcpy(inside, element, 2);
            } else {
                memset(inside, 0, 2);
            }
        }
    }
    if (copy.in) {
        brought++;
        came_in(block, copy, bytes);
    } else {
        --*copy.group;
    }
}

// Where an element of an operand lies: an outer index (row of the first, column of the second operand), and an index that is summed over.
uint32_t element_at(uint64_t descriptor, bool by_columns, uint32_t outer, uint32_t inner) {
    const uint32_t start = uint32_t(descriptor & 0x3fff) << 4;
    const uint32_t leading = uint32_t(descriptor >> 16 & 0x3fff) << 4, stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
    if (by_columns) return swizzled(start + outer / 64 * leading + inner / 8 * stride + inner % 8 * 128 + outer % 64 * 2);
    return swizzled(start + outer / 8 * stride + outer % 8 * 128 + inner * 2);
}

float shared_element(Block& block, uint32_t at, float (*widen)(uint16_t)) {
    if (!fits(block, at, 2, "the matrix units")) return 0;
    if (block.owner[at] != 0) published(block, at, 2, "the matrix units");
    uint16_t bits;
    memcpy(&bits, &block.shared[at], 2);
    return widen(bits);
}

void multiply_now(Block& block, const Asked& asked) {
    const machine::Product& first = asked.of[0];
    if ((first.b_at >> 62) != 1 || (!first.registers && (first.a_at >> 62) != 1)) return note("an operand that is not swizzled by 128 bytes");
    float a[64][16], b[16][256];
    for (unsigned thread = 0; thread < GROUP; thread++) {
        const machine::Product& own = asked.of[thread];
        if (own.columns != first.columns || own.registers != first.registers || own.a_at != first.a_at || own.b_at != first.b_at
            || own.add != first.add || own.a_by_columns != first.a_by_columns || own.b_by_columns != first.b_by_columns) {
            return note("the threads of a group ask for different products");
        }
        if (!own.registers) continue;
        const unsigned row = thread / WARP * 16 + thread % WARP / 4, k = 2 * (thread & 3);
        for (unsigned part = 0; part < 4; part++) {
            for (unsigned half = 0; half < 2; half++) {
                a[row + 8 * (part & 1)][k + 8 * (part >> 1) + half] = own.widen(uint16_t(own.a[part] >> 16 * half));
            }
        }
    }
    if (!first.registers) {
        for (uint32_t row = 0; row < 64; row++) {
            for (uint32_t k = 0; k < 16; k++) a[row][k] = shared_element(block, element_at(first.a_at, first.a_by_columns, row, k), first.widen);
        }
    }
    const uint32_t columns = uint32_t(first.columns);
    for (uint32_t column = 0; column < columns; column++) {
        for (uint32_t k = 0; k < 16; k++) b[k][column] = shared_element(block, element_at(first.b_at, first.b_by_columns, column, k), first.widen);
    }
    float sums[64][256];
    for (uint32_t row = 0; row < 64; row++) {
        for (uint32_t column = 0; column < columns; column++) sums[row][column] = 0;
        for (uint32_t k = 0; k < 16; k++) {
            const float x = a[row][k];
            for (uint32_t column = 0; column < columns; column++) sums[row][column] += x * b[k][column];
        }
    }
    for (unsigned thread = 0; thread < GROUP; thread++) {
        const machine::Product& own = asked.of[thread];
        const unsigned row = thread / WARP * 16 + thread % WARP / 4;
        for (uint32_t n = 0; n < columns / 2; n++) {
            const float sum = sums[row + 8 * (n >> 1 & 1)][n / 4 * 8 + 2 * (thread & 3) + (n & 1)];
            own.results[n] = own.add ? own.results[n] + sum : sum;
        }
    }
}

// Engines come to some of what they were asked.
void run(const Write& write) {
    float* to = static_cast<float*>(write.to);
    for (float number : write.numbers) {
        *to = write.adds ? *to + number : number;
        to++;
    }
    --*write.unwritten;
}

bool engines(Block& block) {
    bool any = false;
    for (size_t n = 0; n < block.writes.size() && !failed;) {
        if (block.writes[n].later > 0) {
            block.writes[n++].later--;
            continue;
        }
        run(block.writes[n]);
        block.writes.erase(block.writes.begin() + long(n));
        any = true;
    }
    for (size_t n = 0; n < block.copies.size() && !failed;) {
        if (block.copies[n].later > 0) {
            block.copies[n++].later--;
        } else if (random_bits() % 4 == 0) {
            const Copy copy = block.copies[n];
            block.copies.erase(block.copies.begin() + long(n));
            run(block, copy);
            any = true;
        } else {
            n++;
        }
    }
    for (Group& group : block.groups) {
        while (!failed && !group.waiting.empty() && group.waiting.front().count == GROUP && random_bits() % 2 == 0) {
            multiply_now(block, group.waiting.front());
            group.waiting.pop_front();
            group.done++;
            any = true;
        }
    }
    return any;
}

bool asked_for(const Block& block) {
    for (const Group& group : block.groups) {
        if (!group.waiting.empty() && group.waiting.front().count == GROUP) return true;
    }
    return !block.copies.empty() || !block.writes.empty();
}

void stuck(const std::vector<std::unique_ptr<Block>>& live) {
    char text[700];
    size_t at = 0;
    const Block& block = *live.front();
    for (unsigned n = 0; n < block.threads && at < sizeof text - 120; n += WARP) {
        const Fiber& fiber = *block.fibers[n];
        at += size_t(snprintf(text + at, sizeof text - at, "%s%u: %s (%s:%d)", n == 0 ? "" : ", ", n, fiber.site.what, fiber.site.file, fiber.site.line));
    }
    note("nothing goes on; threads of a block wait at %s", text);
}

}  // namespace

namespace machine {

const Index& thread_index() { return now->index; }
const Index& block_index() { return now->block->index; }
const Index& block_count() { return grid; }
unsigned block_threads() { return now->block->threads; }

void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    told(format, list);
    va_end(list);
    for (;;) to_scheduler();
}

void wait(const Site& site, bool (*holds)(const void*), const void* condition) {
    now->site = site;
    now->holds = holds;
    now->condition = condition;
    to_scheduler();
    now->holds = nullptr;
}

void progress() { went_on = true; }

void linger() { now->block->warps[now->number / WARP].late = lateness(4, 4000); }

// Comes to the half of the board whose turn it is, which has what this lane tells, and waits for the other lanes.
static void come_lane(Warp& warp, uint64_t half, uint64_t wanted, const Site& site) {
    warp.sites[half][now->number % WARP] = site;
    warp.came[half]++;
    went_on = true;
    until(site, [&] { return warp.came[half] >= wanted; });
    // Each lane looks at the first: where all are as that, all are alike.
    const Site& other = warp.sites[half][0];
    if (other.line != site.line || (other.what != site.what && strcmp(other.what, site.what) != 0)) {
        fail("lanes of a warp part: %s at line %d, %s at line %d", site.what, site.line, other.what, other.line);
    }
}

const uint32_t* tell(uint32_t bits, const Site& site) {
    Fiber& self = *now;
    Warp& warp = self.block->warps[self.number / WARP];
    const uint64_t half = self.told & 1, wanted = (self.told / 2 + 1) * WARP;
    self.told++;
    warp.board[half][self.number % WARP] = bits;
    come_lane(warp, half, wanted, site);
    return warp.board[half];
}

const float* tell_all(const uint32_t* words, unsigned count, void (*make)(const uint32_t (*all)[WORDS], float* results), const Site& site) {
    Fiber& self = *now;
    Warp& warp = self.block->warps[self.number / WARP];
    const uint64_t half = self.told & 1, wanted = (self.told / 2 + 1) * WARP;
    self.told++;
    memcpy(warp.words[half][self.number % WARP], words, count * sizeof *words);
    if (warp.came[half] + 1 == wanted) make(warp.words[half], warp.results[half]);
    come_lane(warp, half, wanted, site);
    return warp.results[half];
}

// What this thread stored and copied is there for those who meet it at a barrier.
static void shown() {
    Fiber& self = *now;
    for (uint32_t at : self.came_16) self.block->flight[at / 16] = 0;
    self.came_16.clear();
    for (uint32_t word : self.stored) {
        uint16_t& fresh = self.block->fresh[word];
        if (fresh == self.number + 1) fresh = 0;
    }
    self.stored.clear();
}

void come(unsigned number, unsigned threads, bool waits, const Site& site) {
    Numbered& barrier = now->block->numbered[number];
    if (number > 15 || threads % WARP != 0 || (barrier.came > 0 && barrier.threads != threads)) {
        fail("barrier %u of %u threads, of %u before", number, threads, barrier.threads);
    }
    barrier.threads = threads;
    shown();
    const uint64_t round = barrier.round;
    if (++barrier.came == threads) {
        barrier.came = 0;
        barrier.round++;
    }
    went_on = true;
    if (waits) until(site, [&] { return barrier.round > round; });
}

unsigned char* shared(uint32_t at, size_t bytes, const char* what) {
    if (!fits(*now->block, at, bytes, what)) fail("%s", what);
    return &now->block->shared[at];
}

// Bytes to which a copy is under way, or one that another thread waited for and no barrier followed.
static void landed(uint32_t at, size_t bytes, const char* what) {
    const Block& block = *now->block;
    for (uint32_t line = at / 16; line <= (at + bytes - 1) / 16; line++) {
        const uint16_t flight = block.flight[line];
        if (flight != 0 && flight != (uint16_t(now->number + 1) | 0x8000)) {
            fail("%s of shared memory at %u, to which a copy of thread %u is under way", what, at, (flight & 0x7fffu) - 1);
        }
    }
}

void store(uint32_t at, const void* from, size_t bytes) {
    memcpy(shared(at, bytes, "a store"), from, bytes);
    landed(at, bytes, "a store");
    for (uint32_t word = at / 4; word <= (at + bytes - 1) / 4; word++) {
        now->block->fresh[word] = uint16_t(now->number + 1);
        now->stored.push_back(word);
    }
    for (size_t n = 0; n < bytes; n++) now->block->owner[at + n] = uint16_t(now->number + 1);
    now->unpublished.push_back({at, bytes});
}

void load(uint32_t at, void* to, size_t bytes) {
    memcpy(to, shared(at, bytes, "a load"), bytes);
    landed(at, bytes, "a load");
    for (uint32_t word = at / 4; word <= (at + bytes - 1) / 4; word++) {
        const uint16_t fresh = now->block->fresh[word];
        // Lanes of a warp have other ways to meet.
        if (fresh != 0 && (fresh - 1u) / WARP != now->number / WARP) fail("a load of shared memory at %u, which thread %u stored and came to no barrier since", at, fresh - 1u);
    }
}

static void run(Sixteen& copy) {
    unsigned char* to = &now->block->shared[copy.to];
    if (copy.bytes > 0) memcpy(to, copy.from, copy.bytes);
    memset(to + copy.bytes, 0, 16 - copy.bytes);
    copy.waits = false;
}

void copy_16(uint32_t to, const void* from, uint32_t bytes) {
    shared(to, 16, "a copy");
    if (to % 16 != 0 || uintptr_t(from) % 16 != 0 || bytes > 16) fail("a copy of %u bytes at %p to %u", bytes, from, to);
    if (bytes > 0 && !holds(uint64_t(from), bytes)) fail("a copy of %u bytes at %p, which no allocation has", bytes, from);
    landed(to, 16, "a copy to 16 bytes");
    for (uint32_t word = to / 4; word < to / 4 + 4; word++) now->block->fresh[word] = 0;
    now->block->flight[to / 16] = uint16_t(now->number + 1);
    // At once, or as late as may be.
    Sixteen copy = {to, from, bytes, true};
    brought += bytes > 0;
    if (random_bits() % 2 == 0) run(copy);
    now->asked_16.push_back(copy);
    went_on = true;
}

void copies_commit() {
    now->groups_16.push_back(std::move(now->asked_16));
    now->asked_16.clear();
}

void copies_wait(size_t groups) {
    Fiber& self = *now;
    while (self.groups_16.size() > groups) {
        for (Sixteen& copy : self.groups_16.front()) {
            if (copy.waits) run(copy);
            self.block->flight[copy.to / 16] |= 0x8000;
            self.came_16.push_back(copy.to);
        }
        self.groups_16.pop_front();
    }
}

void publish() {
    for (const Range& range : now->unpublished) {
        for (size_t n = 0; n < range.bytes; n++) {
            uint16_t& owner = now->block->owner[range.at + n];
            if (owner == now->number + 1) owner = 0;
        }
    }
    now->unpublished.clear();
}

void barrier_init(uint32_t at, uint32_t arrivals) {
    shared(at, 8, "a barrier");
    if (at % 8 != 0 || arrivals == 0) fail("a barrier of %u arrivals at %u", arrivals, at);
    now->block->barriers[at] = Barrier{arrivals, arrivals, 0, 0};
}

static Barrier& barrier_at(uint32_t at) {
    auto found = now->block->barriers.find(at);
    if (found == now->block->barriers.end()) fail("there is no barrier at %u", at);
    return found->second;
}

void barrier_arrive(uint32_t at, uint32_t bytes) {
    shown();
    Barrier& barrier = barrier_at(at);
    if (barrier.left == 0) fail("more arrive at the barrier at %u than it is for", at);
    barrier.bytes += bytes;
    barrier.left--;
    advance(barrier);
    went_on = true;
}

void barrier_wait(uint32_t at, uint32_t parity, const Site& site) {
    const Barrier& barrier = barrier_at(at);
    until(site, [&] { return (barrier.phase & 1) != parity; });
}

static void copy(bool in, uint32_t shared, const uint64_t* map, uint32_t barrier, const int (&place)[4], std::shared_ptr<int> group) {
    Copy copy = {in, shared, barrier, {}, {place[0], place[1], place[2], place[3]}, std::move(group), nullptr, 0, lateness(8, 100)};
    memcpy(copy.map, map, sizeof copy.map);
    now->block->copies.push_back(std::move(copy));
    went_on = true;
}

void copy_in(uint32_t to, const uint64_t* map, uint32_t barrier, const int (&place)[4]) { copy(true, to, map, barrier, place, nullptr); }

static void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    now->block->copies.push_back(Copy{true, to, barrier, {}, {}, nullptr, const_cast<void*>(from), bytes, lateness(8, 100)});
    went_on = true;
}

void copy_row_in(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    if (!holds(uint64_t(from), bytes)) fail("a copy of %u bytes at %p, which no allocation has", bytes, from);
    copy_bytes(to, from, bytes, barrier);
}

void nothing_in(uint32_t to, uint32_t bytes, uint32_t barrier) {
    static const uint8_t nothing[192 * 128] = {};
    if (bytes > sizeof nothing) fail("%u zeros, and there are %zu", bytes, sizeof nothing);
    copy_bytes(to, nothing, bytes, barrier);
}

void copy_out(uint32_t from, const uint64_t* map, const int (&place)[4]) {
    ++*now->open;
    copy(false, from, map, 0, place, now->open);
}

void row_out(void* to, uint32_t from, uint32_t bytes, bool adds) {
    if (!holds(uint64_t(to), bytes)) fail("%u bytes leave for %p, which no allocation has", bytes, to);
    ++*now->open;
    now->block->copies.push_back(Copy{false, from, 0, {}, {}, now->open, to, bytes, lateness(8, 100), adds, now->unwritten});
    ++*now->unwritten;
    went_on = true;
}

void copy_out_ends() {
    now->under_way.push_back(now->open);
    now->open = std::make_shared<int>(0);
}

void copied_out(size_t left, const Site& site) {
    Fiber& self = *now;
    const size_t wanted = self.under_way.size() - std::min(left, self.under_way.size());
    until(site, [&] { return std::all_of(self.under_way.begin(), self.under_way.begin() + long(wanted), [](const auto& group) { return *group == 0; }); });
    self.under_way.erase(self.under_way.begin(), self.under_way.begin() + long(wanted));
}

void arrived_out(const Site& site) {
    copied_out(0, site);
    const int& left = *now->unwritten;
    until(site, [&] { return left == 0; });
}

void multiply_begin() { now->begun = true; }

void multiply(const Product& product) {
    Fiber& self = *now;
    if (!self.begun) fail("a product before the registers are handed over");
    Group& group = self.block->groups[self.number / GROUP];
    const uint64_t at = self.asked++ - group.done;
    if (group.waiting.size() <= at) group.waiting.resize(at + 1);
    Asked& asked = group.waiting[at];
    asked.of[self.number % GROUP] = product;
    asked.count++;
    if (!product.add) {
        for (int n = 0; n < product.columns / 2; n++) product.results[n] = __builtin_nanf("");
    }
    went_on = true;
}

void multiply_ends() {
    now->groups.push_back(now->asked);
    now->begun = false;
}

void multiplied(int groups, const Site& site) {
    Fiber& self = *now;
    Group& group = self.block->groups[self.number / GROUP];
    if (!self.groups.empty() && self.groups.back() != self.asked) fail("a product that is in no group when it is waited for");
    uint64_t wanted = 0;
    while (self.groups.size() > size_t(groups)) {
        wanted = self.groups.front();
        self.groups.pop_front();
    }
    until(site, [&] { return group.done >= wanted; });
}

void registers(int count, bool more) {
    Block& block = *now->block;
    const unsigned group = now->number / GROUP;
    if (count % 8 != 0 || count < 24 || count > 256) fail("%d registers of a thread", count);
    (void)more;
    block.registers[group] = count;
    int all = 0;
    for (int of : block.registers) all += of * int(GROUP);
    // What a block is launched with is all that its groups may have: in eights to a thread.
    const int given = std::min(REGISTERS / int(block.threads), 255) / 8 * 8 * int(block.threads);
    if (all > given) fail("%d registers of a block, which was given %d", all, given);
}

}  // namespace machine

// A thread has touched an address where nothing is. Comes back where no thread has its turn.
extern "C" __attribute__((visibility("default"))) void emulated_touched(const void* at) {
    if (inside) machine::fail("thread %u of block %u touches %p, which is no memory", now->number, now->block->index.x, at);
}

// Runs a launch; what failed is told as a text, nothing is where nothing did.
extern "C" __attribute__((visibility("default"))) int emulated_run(
    void (*of_thread)(void**), const unsigned* blocks, unsigned threads, unsigned shared_bytes, void** given, uint64_t seed, char* text, size_t bytes,
    bool (*allocated)(uint64_t, uint64_t), uint64_t* boxes) {
    holds = allocated;
    brought = 0;
    entry = of_thread;
    arguments = given;
    grid = {blocks[0], blocks[1], blocks[2]};
    random_state = seed;
    failed = false;
    failure = text;
    failure_bytes = bytes;
    const size_t all = size_t(blocks[0]) * blocks[1] * blocks[2];
    size_t next = 0;
    std::vector<std::unique_ptr<Block>> live;
    std::vector<Fiber**> turns;
    while (!failed && (next < all || !live.empty())) {
        while (live.size() < RESIDENT && next < all) {
            const unsigned at = unsigned(next++);
            live.push_back(begin_block({at % blocks[0], at / blocks[0] % blocks[1], at / blocks[0] / blocks[1]}, threads, shared_bytes));
        }
        // Warps in another order each time; lanes one after the other.
        turns.clear();
        for (const auto& block : live) {
            for (unsigned n = 0; n < block->threads; n += WARP) turns.push_back(&block->fibers[n]);
        }
        for (size_t n = turns.size(); n > 1; n--) std::swap(turns[n - 1], turns[random_bits() % n]);
        went_on = false;
        bool under_way = false;
        for (Fiber** warp : turns) {
            unsigned& late = (*warp)->block->warps[(*warp)->number / WARP].late;
            late = late > 0 ? late - 1 : lateness(200, 60);
            if (late > 0) {
                under_way = true;
                continue;
            }
            for (unsigned lane = 0; lane < WARP && !failed; lane++) {
                if (warp[lane]->ended || (warp[lane]->holds != nullptr && !warp[lane]->holds(warp[lane]->condition))) continue;
                now = warp[lane];
                inside = true;
                switch_stacks(&scheduler, now->saved);
            }
        }
        for (size_t n = 0; n < live.size() && !failed;) {
            Block& block = *live[n];
            if (engines(block)) went_on = true;
            under_way |= asked_for(block);
            block.live = 0;
            for (const Fiber* fiber : block.fibers) block.live += !fiber->ended;
            if (block.live == 0 && block.copies.empty() && block.writes.empty()) {
                end_block(block);
                live.erase(live.begin() + long(n));
                went_on = true;
            } else {
                n++;
            }
        }
        if (!went_on && !under_way && !failed && !live.empty()) stuck(live);
    }
    for (auto& block : live) end_block(*block);
    // A process may have so many mappings, and there is a machine for each text.
    for (char* left : stacks) munmap(left, STACK_BYTES);
    stacks.clear();
    *boxes = brought;
    return failed;
}
