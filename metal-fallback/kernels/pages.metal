// Where keys and values of a batch entry are: one behind the other, or in pages.

// Those of a head.
struct KeyRows {
    const device Element* from;
    long stride;
#if WITH_PAGES
    // Which pages the entry has, and how far apart pages are.
    const device int* pages;
    long page;
#endif
};

// Where one is. A page that is none stands for one that is, as nobody has looked at the table.
inline const device Element* key_row(KeyRows rows, int key) {
#if WITH_PAGES
    const long page = clamp(rows.pages[key / PAGE_TOKENS], 0, PAGES - 1);
    return rows.from + page * rows.page + key % PAGE_TOKENS * rows.stride;
#else
    return rows.from + key * rows.stride;
#endif
}

// Copies some to the threadgroup, from one on, with zeros past the end and past the dim. Whether an odd number was among those of this thread.
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
