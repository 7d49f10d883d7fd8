// Location of the keys and values of a batch entry: contiguous rows, or pages.

// The keys or values of one head.
struct KeyRows {
    const device Element* from;
    long stride;
#if WITH_PAGES
    // Page numbers of the batch entry, and the stride between pages.
    const device int* pages;
    long page;
#endif
};

// Address of the row of a key. Page numbers are clamped to the pool, because the page table is unchecked device data.
inline const device Element* key_row(KeyRows rows, int key) {
#if WITH_PAGES
    const long page = clamp(rows.pages[key / PAGE_TOKENS], 0, PAGES - 1);
    return rows.from + page * rows.page + key % PAGE_TOKENS * rows.stride;
#else
    return rows.from + key * rows.stride;
#endif
}

// Copies COUNT rows, beginning at row `first`, to threadgroup memory. Tile rows from `present` on, and columns from DIM on, are filled with zeros. Returns whether this thread copied an infinity or NaN.
template <int COUNT, int DIM, int PADDED, int PITCH>
inline bool load_keys(threadgroup Element* tile, KeyRows rows, int first, int present, int thread_index) {
    bool odd = false;
    for (int at = thread_index; at < COUNT * PADDED; at += THREADS) {
        const int row = at / PADDED;
        const int column = at % PADDED;
        const bool there = row < present && column < DIM;
        const Element value = there ? key_row(rows, first + row)[column] : Element(0.0f);
        tile[row * PITCH + column] = value;
        odd = odd || is_odd(float(value));
    }
    return odd;
}

#if WITH_PAGES
#define KEY_ROWS(operand, strides) \
    KeyRows{operand + head_kv * strides[1], strides[2], page_table + long(batch) * PAGES_OF_ENTRY, strides[0]}
#define PAGE_TABLE_ARGUMENT const device int* page_table [[buffer(14)]],
#else
#define KEY_ROWS(operand, strides) KeyRows{operand + span_k.begin * strides[0] + head_kv * strides[1], strides[2]}
#define PAGE_TABLE_ARGUMENT
#endif
