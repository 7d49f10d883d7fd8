// The engine that copies and the units that multiply.
#pragma once

#include "state.h"

#include <string.h>

namespace {

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

// Bytes in a row to the same place of a block that runs with this one.
void run_to_peer(Block& block, const Copy& copy) {
    if (copy.bytes % 16 != 0 || copy.shared % 16 != 0) return note("%u bytes in a row to %u", copy.bytes, copy.shared);
    if (!fits(block, copy.shared, copy.bytes, "a copy") || !fits(*copy.peer, copy.shared, copy.bytes, "a copy")) return;
    published(block, copy.shared, copy.bytes, "the copy engine");
    memcpy(&copy.peer->shared[copy.shared], &block.shared[copy.shared], copy.bytes);
    came_in(*copy.peer, copy, copy.bytes);
}

void run(Block& block, const Copy& copy) {
    if (copy.peer != nullptr && copy.row == nullptr && copy.bytes > 0) return run_to_peer(block, copy);
    // A box comes to the block that it is for as if that had asked.
    if (copy.peer != nullptr && copy.peer != &block) return run(*copy.peer, copy);
    if (copy.row != nullptr) {
        if (copy.bytes % 16 != 0 || copy.shared % 16 != 0 || uintptr_t(copy.row) % 16 != 0) return note("%u bytes in a row to %u", copy.bytes, copy.shared);
        if (!fits(block, copy.shared, copy.bytes, "a copy")) return;
        if (copy.in) {
            memcpy(&block.shared[copy.shared], copy.row, copy.bytes);
            return came_in(block, copy, copy.bytes);
        }
        published(block, copy.shared, copy.bytes, "the copy engine");
        Write write = {copy.row, std::vector<uint32_t>(copy.bytes / 4), copy.adds, copy.unwritten, lateness(8, 4000)};
        memcpy(write.bits.data(), &block.shared[copy.shared], copy.bytes);
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
    char* to = static_cast<char*>(write.to);
    for (const uint32_t bits : write.bits) {
        uint32_t before, sum_bits;
        float number, sum;
        memcpy(&before, to, 4);
        memcpy(&sum, to, 4);
        memcpy(&number, &bits, 4);
        sum += number;
        memcpy(&sum_bits, &sum, 4);
        const uint32_t words[] = {bits, sum_bits, before + bits};
        memcpy(to, &words[int(write.adds)], 4);
        to += 4;
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

}  // namespace
