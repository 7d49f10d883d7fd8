// What is told of a row beside its output.

// `log` is the logarithm in base 2 of the row's sum, `largest` its largest score and `sum` the exponentials next to that. A row that is not there is told of as one
// without keys.
inline void tell_row(const Params& p, long at, bool there, float log, float largest, float sum) {
#if WITH_STATS
    const float stat = WITH_BASE_TWO ? log : log * LN_2;
    p.stats[at] = there ? stat : -INFINITE;
#endif
#if WITH_ROW_MAX
    // The largest of some numbers leaves out what is none.
    const float told = sum == sum ? largest : sum;
    p.row_max[at] = there ? told : -INFINITE;
#endif
#if WITH_SUM_EXP
    p.sum_exp[at] = there ? sum : 0.0f;
#endif
}
