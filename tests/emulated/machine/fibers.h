// A fiber for each thread, and blocks of them.
#pragma once

#include "state.h"

#include <stdlib.h>
#include <sys/mman.h>

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
    if (void* kept = take_stack()) return static_cast<char*>(kept);
    void* made = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED || mprotect(made, 4096, PROT_NONE) != 0) {
        perror("a thread's stack");
        abort();
    }
    return static_cast<char*>(made);
}

std::unique_ptr<Block> begin_block(Index index, unsigned threads, unsigned shared_bytes, const std::shared_ptr<Together>& together) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->rank = unsigned(together->blocks.size());
    block->together = together;
    together->blocks.push_back(block.get());
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
    block.together->blocks[block.rank] = nullptr;
    for (Fiber* fiber : block.fibers) {
        stacks.push_back(fiber->stack);
        delete fiber;
    }
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
