// What a machine has: threads, warps, blocks, and what they asked of engines.
#pragma once

#include "machine.h"

#include <bitset>
#include <deque>
#include <map>
#include <memory>
#include <stdarg.h>
#include <stdio.h>
#include <vector>

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
    // How often it has met the lanes of its warp.
    uint64_t met = 0;
};

// A word that a lane stored before its warp met for the so manieth time: whoever of the warp comes to a barrier after that shows it.
struct Stored {
    uint32_t word;
    uint16_t thread;
    uint64_t met;
};

struct Warp {
    // Turns that it misses.
    unsigned late = 0;
    std::vector<Stored> stored;
    uint32_t board[2][WARP];
    uint32_t words[2][WARP][machine::WORDS];
    float results[2][machine::RESULTS];
    Site sites[2][WARP];
    uint64_t came[2] = {};
};

struct Numbered {
    unsigned threads = 0, came = 0;
    std::bitset<1024> who;
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
    machine::Adds adds = machine::Adds::Nothing;
    std::shared_ptr<int> unwritten = nullptr;
    // Of what goes to a block that runs with this one: that block.
    Block* peer = nullptr;
};

// Bytes that were read from shared memory, and are not where they go.
struct Write {
    void* to;
    std::vector<uint32_t> bits;
    machine::Adds adds;
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

// Blocks that run together, and how often all threads of theirs have met.
struct Together {
    std::vector<Block*> blocks;
    unsigned came = 0;
    uint64_t round = 0;
};

struct Block {
    Index index;
    unsigned rank;
    std::shared_ptr<Together> together;
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
// Stacks of earlier launches, of any kernel: mapping one for each thread of a launch costs more than many kernels do.
void* (*take_stack)();
void (*keep_stack)(void*);
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

}  // namespace
