// What becomes of sums of gradients of queries: two warps of each block of threads bring what a section before has summed up, round it, take it out, and leave zeros
// for another section. Of the last sections numbers behind those of blocks of keys tell.

// Slices of a section, from <= slice < past.
struct Slices {
    int section, from, past;
};

// Those that a number stands for: of the section so many behind.
inline Slices slices_of(const Params& p, int number) {
    const int past = number - p.numbers, each = p.section * p.blocks * shares_of(p);
    const int own = past < 0 ? number / each : p.sections + past / p.tail, section = own - p.behind;
    if (section < 0) return Slices{0, 0, 0};
    const int at = past < 0 ? number - own * each : past % p.tail, of = past < 0 ? numbers_in(p, own) : p.tail;
    const int slices = slices_in(p, section), share = (slices + of - 1) / of;
    return Slices{section, min(at * share, slices), min(at * share + share, slices)};
}

// Which head, tile of queries and part of it a slice is; with as much of its key head as says where it lies.
struct Slice {
    Tile keys;
    int head, queries, part;
    float* sums;
};

inline Slice slice_of(const Params& p, int section, int n) {
    const int of = n / SLICES / p.tiles, unit = of / p.group, both = section * p.section + unit, heads_kv = p.heads_q / p.group;
    const Tile keys = {0, both / heads_kv, both % heads_kv, 0, 0, 0, section, p.ring > 0 ? section % p.ring * p.section + unit : 0};
    const int head = keys.head * p.group + of % p.group, queries = n / SLICES % p.tiles, part = n % SLICES;
    return Slice{keys, head, queries, part, slice_at(p, span_of(p, keys.batch), keys, head, queries, part)};
}

// The first slice from one on, of every other, that has any queries; `past` where none has.
inline int next_slice(const Params& p, const Slices& slices, int n, Slice& slice) {
    for (; n < slices.past; n += 2) {
        slice = slice_of(p, slices.section, n);
        if (!WITH_PACKED_Q || slice.queries * TILE_M < span_of(p, slice.keys.batch).len_q) return n;
    }
    return slices.past;
}

// Rounds a piece: 16 rows by 64 columns, as the threads of a warp had them, to rows that the copy engine takes out.
inline void round_piece(float scale, uint from, uint to) {
    const int lane = threadIdx.x & 31;
    const uint rows = to + (lane & 15) * ROW_BYTES + ((lane >> 4 ^ (lane & 7)) << 4);
    from += lane * 16;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        const float4 one = ld_shared_v4_f32(from + n * 512), other = ld_shared_v4_f32(from + n * 512 + 512);
        stmatrix_x4(rows ^ n << 4, pack_pair(Element{}, one.x * scale, one.y * scale), pack_pair(Element{}, one.z * scale, one.w * scale),
                       pack_pair(Element{}, other.x * scale, other.y * scale), pack_pair(Element{}, other.z * scale, other.w * scale));
    }
}

// Brings a piece: one of two places has it.
inline void piece_in(uint pieces, uint full, const float* sums, int n) {
    mbarrier_arrive_expect_tx(full + 8 * (n & 1), PIECE_BYTES);
    cp_async_bulk_load(pieces + (n & 1) * PIECE_BYTES, sums + n * PIECE, PIECE_BYTES, full + 8 * (n & 1));
}

// Settles the slices of a number that one of the two warps has. Of four pieces of a slice two are brought at once, the next slice's beside the last ones.
inline void settle(const TensorMap& dq_map, const Params& p, const Shared& at, const Slices& slices, int mine) {
    const bool first = (threadIdx.x & 31) == 0, again = p.ring > 0 && slices.section + p.ring < p.sections;
    const uint pieces = at.settled + mine * SETTLED_BYTES, rounded = pieces + 2 * PIECE_BYTES, full = at.settled_full + 16 * mine;
    Slice slice, next;
    int number = next_slice(p, slices, slices.from + mine, slice);
    if (first) counter_acquire_wait(p.done + slices.section, numbers_in(p, slices.section));
    __syncwarp();
    if (first && number < slices.past) piece_in(pieces, full, slice.sums, 0), piece_in(pieces, full, slice.sums, 1);
    while (number < slices.past) {
        number = next_slice(p, slices, number + 2, next);
        const bool more = number < slices.past;
        const int first_row = slice.queries * TILE_M + (TILE_M == 128 ? slice.part * 64 : 0), panel = TILE_M == 128 ? 0 : slice.part;
#pragma unroll 1
        for (int n = 0; n < 4; n++) {
            const uint to = rounded + (n & 1) * 16 * ROW_BYTES;
            mbarrier_wait_parity(full + 8 * (n & 1), n >> 1);
            if (first) cp_async_bulk_wait_group_read<1>();
            __syncwarp();
            round_piece(p.scale, pieces + (n & 1) * PIECE_BYTES, to);
            fence_proxy_async();
            __syncwarp();
            if (!first) continue;
            if (n < 2 || more) piece_in(pieces, full, n < 2 ? slice.sums : next.sums, n ^ 2);
            const Span span = span_of(p, slice.keys.batch);
            rows_out<WITH_PACKED_Q>(to, dq_map, panel, QK_THERE, first_row + 16 * n, span.begin_q, span.len_q, slice.head, slice.keys.batch);
            if (again) cp_async_bulk_store(slice.sums + n * PIECE, at.zeros, PIECE_BYTES);
            cp_async_bulk_commit_group();
        }
        slice = next;
    }
    // Slices without queries count too.
    if (first) {
        cp_async_bulk_wait_group();
        counter_release_add(p.settled + slices.section, (slices.past - slices.from + 1 - mine) / 2);
    }
}

inline void settle_all(const TensorMap& dq_map, const Params& p, const Shared& at) {
    const int mine = alike(int(threadIdx.x >> 5)) & 1;
    Told told;
    while (true) {
        const int number = next_of(told, at);
        if (number >= p.last) break;
        const Slices slices = slices_of(p, number);
        if (slices.from < slices.past) settle(dq_map, p, at, slices, mine);
    }
    if ((threadIdx.x & 31) == 0) cp_async_bulk_wait_group_read();
}
