// What the emulated functions of MSL ask of the machine that runs them.
#pragma once

namespace machine {

// Where lanes meet; two lanes meet only at the same place of the source.
struct Site {
    const char* what;
    const char* file;
    int line;
};

constexpr int SIMD = 32;

// Waits for all lanes of the simdgroup. The place in registers: what is read back wider than it was written stalls, and lanes meet a lot.
void meet(const char* what, const char* file, int line);
// Waits for all threads of the threadgroup; with `orders`, what they did before is done for all of them after.
void barrier(const char* file, int line, bool orders);
// This lane in its simdgroup.
int lane();
// Memory of the simdgroup for what its lanes tell one another at a meeting: `advance` turns to the other half, so that what was told
// stays until every lane has come to the next meeting.
unsigned char* board(bool advance);
constexpr int BOARD_BYTES = 2048;
// Stops the run.
[[noreturn]] void fail(const char* format, ...);

// A thread's place.
struct Thread {
    unsigned group[3];
    unsigned index;
    unsigned simdgroup;
    unsigned lane;
};

}  // namespace machine

// The kernel, called with buffers and threadgroup memory in the order of the plan; made by the test.
void run_thread(void* const* buffers, void* const* tiles, const machine::Thread& self);
