// What threads ask for.
#pragma once

#include "engines.h"
#include "fibers.h"

#include <algorithm>

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

void meet_lanes(const Site& site) {
    Fiber& self = *now;
    Warp& warp = self.block->warps[self.number / WARP];
    for (uint32_t word : self.stored) warp.stored.push_back({word, uint16_t(self.number), self.met + 1});
    self.stored.clear();
    tell(0, site);
    self.met++;
}

static void show(Block& block, uint32_t word, unsigned thread) {
    uint16_t& fresh = block.fresh[word];
    if (fresh == thread + 1) fresh = 0;
}

// What this thread stored and copied is there for those who meet it at a barrier, and what its warp stored before they met.
static void shown() {
    Fiber& self = *now;
    std::vector<Stored>& all = self.block->warps[self.number / WARP].stored;
    const auto seen = [&](const Stored& of) {
        if (of.met > self.met) return false;
        show(*self.block, of.word, of.thread);
        return true;
    };
    all.erase(std::remove_if(all.begin(), all.end(), seen), all.end());
    for (uint32_t at : self.came_16) self.block->flight[at / 16] = 0;
    self.came_16.clear();
    for (uint32_t word : self.stored) show(*self.block, word, self.number);
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
    // For another of its threads, which has not come yet.
    if (barrier.who[now->number]) fail("a thread comes to barrier %u again before the others have come", number);
    barrier.who.set(now->number);
    if (++barrier.came == threads) {
        barrier.came = 0;
        barrier.who.reset();
        barrier.round++;
    }
    went_on = true;
    if (waits) {
        until(site, [&] { return barrier.round > round; });
    } else {
        // The others may be on their way to the next round before this warp goes on.
        if (now->number % WARP == 0) now->block->warps[now->number / WARP].late = lateness(4, 100);
        until(site, [] { return true; });
    }
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

static Barrier& barrier_at(Block& block, uint32_t at) {
    auto found = block.barriers.find(at);
    if (found == block.barriers.end()) fail("there is no barrier at %u", at);
    return found->second;
}

static void arrive_at(Block& block, uint32_t at, uint32_t bytes) {
    shown();
    Barrier& barrier = barrier_at(block, at);
    if (barrier.left == 0) fail("more arrive at the barrier at %u than it is for", at);
    barrier.bytes += bytes;
    barrier.left--;
    advance(barrier);
    went_on = true;
}

void barrier_arrive(uint32_t at, uint32_t bytes) { arrive_at(*now->block, at, bytes); }

// A block that runs with this one, which has not ended.
static Block& in_pair(unsigned rank) {
    const auto& all = now->block->together->blocks;
    if (rank >= all.size()) fail("a block of rank %u, and %zu run together", rank, all.size());
    if (all[rank] == nullptr || all[rank]->live == 0) fail("the block of rank %u has ended", rank);
    return *all[rank];
}

unsigned rank() { return now->block->rank; }

void store_in_pair(uint32_t at, unsigned rank, uint32_t word) {
    Block& block = in_pair(rank);
    if (!fits(block, at, 4, "a store")) fail("a store");
    memcpy(&block.shared[at], &word, 4);
    went_on = true;
}

void barrier_arrive_in_pair(uint32_t at, unsigned rank) { arrive_at(in_pair(rank), at, 0); }

void copy_to_peer(uint32_t at, uint32_t bytes, uint32_t barrier, unsigned rank) {
    Copy copy = {true, at, barrier, {}, {}, nullptr, nullptr, bytes, lateness(8, 100)};
    copy.peer = &in_pair(rank);
    if (copy.peer == now->block) fail("a copy to the own block");
    now->block->copies.push_back(std::move(copy));
    went_on = true;
}

void meet_in_pair(const Site& site) {
    shown();
    Together& together = *now->block->together;
    const uint64_t round = together.round;
    together.came++;
    went_on = true;
    const auto all_came = [&] {
        unsigned left = 0;
        for (const Block* block : together.blocks) {
            if (block == nullptr) continue;
            for (const Fiber* fiber : block->fibers) left += !fiber->ended;
        }
        if (together.round == round && together.came >= left) {
            together.came = 0;
            together.round++;
        }
        return together.round > round;
    };
    until(site, all_came);
}

void barrier_wait(uint32_t at, uint32_t parity, const Site& site) {
    const Barrier& barrier = barrier_at(*now->block, at);
    until(site, [&] { return (barrier.phase & 1) != parity; });
}

static void copy(bool in, uint32_t shared, const uint64_t* map, uint32_t barrier, const int (&place)[4], std::shared_ptr<int> group) {
    Copy copy = {in, shared, barrier, {}, {place[0], place[1], place[2], place[3]}, std::move(group), nullptr, 0, lateness(8, 100)};
    memcpy(copy.map, map, sizeof copy.map);
    now->block->copies.push_back(std::move(copy));
    went_on = true;
}

void copy_in(uint32_t to, const uint64_t* map, uint32_t barrier, const int (&place)[4]) { copy(true, to, map, barrier, place, nullptr); }

// To each whenever the engine comes to it.
void copy_in_pair(uint32_t to, const uint64_t* map, uint32_t barrier, const int (&place)[4]) {
    for (unsigned rank = 0; rank < now->block->together->blocks.size(); rank++) {
        copy(true, to, map, barrier, place, nullptr);
        now->block->copies.back().peer = &in_pair(rank);
    }
}

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

void row_out(void* to, uint32_t from, uint32_t bytes, Adds adds) {
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
