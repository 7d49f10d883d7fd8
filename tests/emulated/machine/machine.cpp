// Runs a launch: a fiber for each thread, some blocks side by side, turns in an order that changes.
//
// What engines are asked for, copies and products, they do whenever they come to it: between any two turns, or many turns later. Warps miss turns. Until a product is
// done its results are NaN; operands are read when it is done, so what was overwritten in between is seen. Shared memory begins as all ones, and what a
// thread stored is kept from engines until the thread has published it.

#include "threads.h"

// A thread has touched an address where nothing is. Comes back where no thread has its turn.
extern "C" __attribute__((visibility("default"))) void emulated_touched(const void* at) {
    if (inside) machine::fail("thread %u of block %u touches %p, which is no memory", now->number, now->block->index.x, at);
}

// Runs a launch; what failed is told as a text, nothing is where nothing did.
extern "C" __attribute__((visibility("default"))) int emulated_run(
    void (*of_thread)(void**), const unsigned* blocks, unsigned together, unsigned threads, unsigned shared_bytes, void** given, uint64_t seed, char* text, size_t bytes,
    bool (*allocated)(uint64_t, uint64_t), void* (*take)(), void (*keep)(void*), uint64_t* boxes) {
    take_stack = take;
    keep_stack = keep;
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
            const auto pair = std::make_shared<Together>();
            for (unsigned rank = 0; rank < together; rank++) {
                const unsigned at = unsigned(next++);
                live.push_back(begin_block({at % blocks[0], at / blocks[0] % blocks[1], at / blocks[0] / blocks[1]}, threads, shared_bytes, pair));
            }
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
    // A process may have so many mappings, and there is a machine for each text: another one's launch takes them.
    for (char* left : stacks) keep_stack(left);
    stacks.clear();
    *boxes = brought;
    return failed;
}
