//! Rules of the unified attention ops.

use crate::flow::over;
use crate::*;

/// Builds a forward op whose operands `spoil` changes before they become tensors.
fn sdpa(
    spoil: impl FnOnce(&mut Graph, &mut [Tensor; 4]),
    finish: impl FnOnce(&mut Graph, SdpaForward) -> SdpaForward,
) -> impl FnOnce(&mut Graph) {
    move |g| {
        let mut qkvo = [("q", [2, 4, 5, 8]), ("k", [2, 2, 7, 8]), ("v", [2, 1, 7, 6]), ("o", [2, 4, 5, 6])]
            .map(|(name, dims)| Tensor::device(name, F16, dims));
        spoil(g, &mut qkvo);
        let [q, k, v, o] = qkvo.map(|t| g.tensor(t));
        let op = finish(g, SdpaForward::plain(q, k, v, o));
        g.push(Op::SdpaForward(Box::new(op)));
    }
}

/// Type and extents of a page table.
type Table = Option<(DType, &'static [i64])>;

#[test]
fn sdpa_forward_rules() {
    let shapes = |at: usize, dims: [i64; 4]| sdpa(move |_, t| t[at] = Tensor::device(t[at].name.clone(), F16, dims), |_, op| op);
    type Set = fn(&mut SdpaForward, TensorId);
    let extra = |dtype, dims: &'static [i64], set: Set| {
        sdpa(
            |_, _| {},
            move |g, mut op| {
                let id = g.input("extra", dtype, dims);
                set(&mut op, id);
                op
            },
        )
    };
    let dropout = |probability: f32, seed: DType, offset: &'static [i64], dump: (DType, &'static [i64])| {
        sdpa(
            |_, _| {},
            move |g, op| {
                let (seed, offset) = (g.input("seed", seed, [1]), g.input("offset", I64, offset));
                let rng_dump = Some(g.input("dump", dump.0, dump.1));
                SdpaForward { dropout: Some(Dropout { probability, seed, offset, rng_dump }), ..op }
            },
        )
    };
    let fp8 = |dtype: DType, descale: &'static [i64]| {
        sdpa(
            move |_, t| {
                for t in t {
                    t.dtype = dtype;
                }
            },
            move |g, op| {
                let names = ["descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o", "amax_s", "amax_o"];
                let n = names.map(|name| g.input(name, F32, if name == "descale_q" { descale } else { &[1, 1, 1, 1] }));
                let [descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, amax_s, amax_o] = n;
                SdpaForward { fp8: Some(Fp8Scales { descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, amax_s, amax_o }), ..op }
            },
        )
    };
    /// Builds pages of 4 rows for k and of 2 for v, with these tables and lengths.
    fn paged(k: Table, v: Table, lengths: bool) -> impl FnOnce(&mut Graph) {
        sdpa(
            |_, t| {
                t[1] = Tensor::device("k", F16, [9, 2, 4, 8]);
                t[2] = Tensor::device("v", F16, [9, 1, 2, 6]);
            },
            move |g, op| SdpaForward {
                page_table_k: k.map(|(dtype, dims)| g.input("table_k", dtype, dims)),
                page_table_v: v.map(|(dtype, dims)| g.input("table_v", dtype, dims)),
                seq_len_kv: lengths.then(|| g.input("seq_len_kv", I32, [2, 1, 1, 1])),
                ..op
            },
        )
    }
    let (tk, tv): (Table, Table) = (Some((I32, &[2, 1, 2, 1])), Some((I32, &[2, 1, 4, 1])));
    good(sdpa(|_, _| {}, |_, op| op));
    good(extra(F32, &[2, 4, 5, 1], |op, t| op.stats = Some(t)));
    good(dropout(0.5, I64, &[1], (F32, &[2, 4, 5, 7])));
    good(fp8(F8E4M3, &[1]));
    good(paged(tk, tv, true));
    good(over_score);
    check(vec![
        case("sdpa_forward(", "q t0 is i8, not a float", sdpa(|_, t| t[0].dtype = I8, |_, op| op)),
        case(
            "sdpa_forward(",
            "the four axes (batch, heads, sequence, dim)",
            sdpa(|_, t| t[0] = Tensor::device("q", F16, [8, 5, 8]), |_, op| op),
        ),
        case("sdpa_forward(", "q has 2 batch entries, k has 3 and v has 2, expected equal numbers", shapes(1, [3, 2, 7, 8])),
        case("sdpa_forward(", "q has head dim 8 and k has head dim 9, expected", shapes(1, [2, 2, 7, 9])),
        case("sdpa_forward(", "k has sequence length 7 and v has 6, expected", shapes(2, [2, 1, 6, 6])),
        case("sdpa_forward(", "q has 4 heads, expected a multiple of the 3 heads of k", shapes(1, [2, 3, 7, 8])),
        case("sdpa_forward(", "q has 4 heads, expected a multiple of the 3 heads of v", shapes(2, [2, 3, 7, 6])),
        case("sdpa_forward(", "o t3 is [2,4,5,8], not [2,4,5,6]", shapes(3, [2, 4, 5, 8])),
        case("sdpa_forward(", "attn_scale t4 is f16, not f32", extra(F16, &[1], |op, t| op.attn_scale = Some(t))),
        case("sdpa_forward(", "attn_scale t4 is [2], not one element", extra(F32, &[2], |op, t| op.attn_scale = Some(t))),
        case("sdpa_forward(", "stats t4 is f16, not f32", extra(F16, &[2, 4, 5, 1], |op, t| op.stats = Some(t))),
        case("sdpa_forward(", "max t4 is [2,4,5], not [2,4,5,1]", extra(F32, &[2, 4, 5], |op, t| op.max = Some(t))),
        case("sdpa_forward(", "sum_exp t4 is [2,4,1,5]", extra(F32, &[2, 4, 1, 5], |op, t| op.sum_exp = Some(t))),
        case("sdpa_forward(", "sink t4 is [4], not [1,4,1,1]", extra(F32, &[4], |op, t| op.sink = Some(t))),
        case("sdpa_forward(", "sink t4 is f16, not f32", extra(F16, &[1, 4, 1, 1], |op, t| op.sink = Some(t))),
        case("sdpa_forward(", "block_mask t4 is [2,4,1,2], not [2,4,1,1]", extra(U8, &[2, 4, 1, 2], |op, t| op.block_mask = Some(t))),
        case("sdpa_forward(", "block_mask t4 is i8, not u8", extra(I8, &[2, 4, 1, 1], |op, t| op.block_mask = Some(t))),
        case("sdpa_forward(", "seq_len_q t4 is [2], not [2,1,1,1]", extra(I32, &[2], |op, t| op.seq_len_q = Some(t))),
        case("sdpa_forward(", "seq_len_kv t4 is f32, not an integer", extra(F32, &[2, 1, 1, 1], |op, t| op.seq_len_kv = Some(t))),
        case("sdpa_forward(", "cu_seq_len_q t4 is [2,1,1,1], not [3,1,1,1]", extra(I32, &[2, 1, 1, 1], |op, t| op.cu_seq_len_q = Some(t))),
        case("sdpa_forward(", "cu_seq_len_kv t4 is f32, not an integer", extra(F32, &[3, 1, 1, 1], |op, t| op.cu_seq_len_kv = Some(t))),
        case(
            "sdpa_forward(",
            "seq_len_q and cu_seq_len_q are both given",
            sdpa(
                |_, _| {},
                |g, op| SdpaForward {
                    seq_len_q: Some(g.input("n", I32, [2, 1, 1, 1])),
                    cu_seq_len_q: Some(g.input("cu", I32, [3, 1, 1, 1])),
                    ..op
                },
            ),
        ),
        case("sdpa_forward(", "only one of k and v has a page table; give both or none", paged(tk, None, true)),
        case("sdpa_forward(", "page tables need seq_len_kv", paged(tk, tv, false)),
        case("sdpa_forward(", "page_table_k t4 is i64, not i32", paged(Some((I64, &[2, 1, 2, 1])), tv, true)),
        case("sdpa_forward(", "page_table_v t5 is [2,1,5,1], not [2,1,4,1]", paged(tk, Some((I32, &[2, 1, 5, 1])), true)),
        case("sdpa_forward(", "dropout probability 1 is not in [0, 1)", dropout(1.0, I64, &[1], (F32, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "seed t4 is f32, not an integer", dropout(0.5, F32, &[1], (F32, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "offset t5 is [2], not one element", dropout(0.5, I64, &[2], (F32, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "rng_dump t6 is [2,4,5,6], not [2,4,5,7]", dropout(0.5, I64, &[1], (F32, &[2, 4, 5, 6]))),
        case("sdpa_forward(", "rng_dump t6 is bool, not a number", dropout(0.5, I64, &[1], (Bool, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "descale_q t4 is [2], not one element", fp8(F8E4M3, &[2])),
    ]);
    let mut wide = Graph::new();
    fp8(F16, &[1])(&mut wide);
    let errors = wide.verify().unwrap_err();
    assert_eq!(errors.0.iter().filter(|e| e.message.contains("8-bit scales are given, but")).count(), 3, "{errors}");
}

/// Builds a valid score graph.
fn over_score(g: &mut Graph) {
    over(g, Tensor::virtual_("score", F32, [2, 4, 5, 7]));
}

#[test]
fn sdpa_backward_rules() {
    let backward = |at: usize, dtype: DType, dims: Vec<i64>| {
        move |g: &mut Graph| {
            let qo: &[i64] = &[2, 4, 5, 8];
            let names = [("q", qo), ("k", &[2, 2, 7, 8]), ("v", &[2, 2, 7, 8]), ("o", qo), ("d_o", qo), ("stats", &[2, 4, 5, 1])];
            let grads = [("dq", qo), ("dk", &[2, 2, 7, 8]), ("dv", &[2, 2, 7, 8]), ("scale", &[1]), ("n", &[2, 1, 1, 1])];
            let mut ids = Vec::new();
            for (i, (name, plain)) in names.into_iter().chain(grads).enumerate() {
                let usual = match name {
                    "stats" | "scale" => F32,
                    "n" => I32,
                    _ => F16,
                };
                ids.push(if i == at { g.input(name, dtype, dims.clone()) } else { g.input(name, usual, plain) });
            }
            let &[q, k, v, o, d_o, stats, dq, dk, dv, scale, n] = &ids[..] else { panic!() };
            g.push(Op::SdpaBackward(Box::new(SdpaBackward {
                q,
                k,
                v,
                o,
                d_o,
                stats,
                attn_scale: Some(scale),
                dq,
                dk,
                dv,
                seq_len_q: None,
                seq_len_kv: Some(n),
                score: None,
            })));
        }
    };
    good(backward(99, F16, vec![]));
    check(vec![
        case("sdpa_backward(", "k t1 is i32, not a float", backward(1, I32, vec![2, 2, 7, 8])),
        case("sdpa_backward(", "d_o t4 is [2,4,5,7], not [2,4,5,8]", backward(4, F16, vec![2, 4, 5, 7])),
        case("sdpa_backward(", "o t3 is [2,4,4,8], not [2,4,5,8]", backward(3, F16, vec![2, 4, 4, 8])),
        case("sdpa_backward(", "dq t6 is [2,4,5,4], not [2,4,5,8]", backward(6, F16, vec![2, 4, 5, 4])),
        case("sdpa_backward(", "dk t7 is [2,4,7,8], not [2,2,7,8]", backward(7, F16, vec![2, 4, 7, 8])),
        case("sdpa_backward(", "dv t8 is [2,4,7,8], not [2,2,7,8]", backward(8, F16, vec![2, 4, 7, 8])),
        case("sdpa_backward(", "stats t5 is f16, not f32", backward(5, F16, vec![2, 4, 5, 1])),
        case("sdpa_backward(", "attn_scale t9 is f64, not f32", backward(9, F64, vec![1])),
        case("sdpa_backward(", "seq_len_kv t10 is [1,1,1,1], not [2,1,1,1]", backward(10, I32, vec![1, 1, 1, 1])),
    ]);
}
