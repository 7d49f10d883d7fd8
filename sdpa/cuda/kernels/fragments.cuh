// Position of a thread's registers in an accumulator. The layout is the same for WGMMA (m64nNk16) and mma.sync (m16n8k16, m16n8k8).
//
// A warp has 16 rows. Of every 8 columns a thread holds two adjacent ones, in two rows that are 8 apart. The thread's first element is at
// (`thread_row`, `thread_column`) of the warp's rows. Register `n` is `fragment_row(n)` rows and `fragment_column(n)` columns from there.

inline int thread_row(int lane) { return lane / 4; }
inline int thread_column(int lane) { return 2 * (lane & 3); }

// Index, 0 or 1, of the row of register `n` among the thread's two rows.
inline int fragment_half(int n) { return n >> 1 & 1; }
inline int fragment_row(int n) { return n & 2 ? 8 : 0; }
inline int fragment_column(int n) { return 8 * (n / 4) + (n & 1); }
// Like fragment_column(n), plus `first`. `first` comes first in the sum, because another order compiles to different machine code.
inline int fragment_column(int first, int n) { return first + 8 * (n / 4) + (n & 1); }

// Returns the next register in the row of register `n`. Row `half` begins with register `2 * half`.
inline int next_in_row(int n) { return n + (n & 1 ? 3 : 1); }

// The address that a lane passes to ldmatrix.x4 or stmatrix.x4 for 16 rows by 16 columns of a 128-byte swizzled panel at `at`. `row` is the lane's row.
// XOR the address with 32 to get the next 16 columns. `at` comes first in the sum, because another order compiles to different machine code.
template <class Row>
inline uint swizzled_matrix_row(uint at, Row row, int lane) { return at + row * 128 + ((lane >> 4 ^ (lane & 7)) << 4); }
