//! Problems without queries or keys.

use sdpa_oracle::{Align, Element, Given, Mask, Numbers, Problem, Statistics, Tensor, attention, check, check_gradients, gradients};

/// Without keys, `o` is 0 and row statistics come from the sink alone, if there is one. Gradients are zeros if either side has no rows.
#[test]
fn without_queries_or_keys_every_result_is_known() {
    let sinks = vec![0.5, -2.0];
    for (seq_q, seq_kv, sink) in [(3, 0, false), (3, 0, true), (0, 5, false), (0, 5, true), (0, 0, true)] {
        let [q, k, v, d_o] = [2 * seq_q * 4, seq_kv * 4, seq_kv * 3, 2 * seq_q * 3].map(|len| vec![0.7; len]);
        let d_o = Tensor::dense(&d_o, [1, 2, seq_q, 3]);
        let p = &Problem {
            shape: [1, 2, 1, seq_q, seq_kv, 4, 3],
            q: Tensor::dense(&q, [1, 2, seq_q, 4]),
            k: Tensor::dense(&k, [1, 1, seq_kv, 4]),
            v: Tensor::dense(&v, [1, 1, seq_kv, 3]),
            element: Element::F32,
            stored: Element::F32,
            scale: 0.5,
            masks: &[Mask::Window { left: None, right: Some(0), align: Align::TopLeft }],
            modify: None,
            sink: sink.then_some(&sinks as &dyn Numbers),
            dropout: None,
            narrow: None,
            fixed_point: None,
        };
        let rows = |none: f64, of: fn(f64) -> f64| -> Vec<f64> {
            (0..2).flat_map(|head| vec![if sink { of(sinks[head]) } else { none }; seq_q]).collect()
        };
        let want = [rows(f64::NEG_INFINITY, |sink| sink), rows(f64::NEG_INFINITY, |sink| sink), rows(0.0, |_| 1.0)];
        let answer = attention(p);
        assert_eq!((answer.o, [answer.stats, answer.row_max, answer.sum_exp]), (vec![0.0; 2 * seq_q * 3], want.clone()));
        let forward = |o: f64, by: [f64; 3]| {
            let o = vec![o; 2 * seq_q * 3];
            let [stats, row_max, sum_exp] = std::array::from_fn(|n| want[n].iter().map(|x| x + by[n]).collect::<Vec<f64>>());
            let statistics = Statistics { stats: Some(&stats), row_max: Some(&row_max), sum_exp: Some(&sum_exp), amax_s: None };
            check(p, Tensor::dense(&o, [1, 2, seq_q, 3]), statistics, &|_| ()).passes()
        };
        assert!(forward(0.0, [0.0; 3]));
        assert_eq!(forward(1e-9, [0.0; 3]), seq_q == 0);
        // Without a sink, stats and row_max are −∞, to which adding a number changes nothing.
        for by in [[0.01, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]] {
            assert_eq!(forward(0.0, by), seq_q == 0 || !sink && by[2] == 0.0, "{by:?}");
        }
        let got = gradients(p, d_o, Given::Own);
        let all = [&got.dq, &got.dk, &got.dv].map(|gradient| gradient.value.clone());
        assert_eq!(all, [2 * seq_q * 4, seq_kv * 4, seq_kv * 3].map(|len| vec![0.0; len]));
        let backward = |by: [f64; 3], d_sink: f64| {
            let got: [Vec<f64>; 3] = std::array::from_fn(|n| vec![by[n]; all[n].len()]);
            let tensors = [[1, 2, seq_q, 4], [1, 1, seq_kv, 4], [1, 1, seq_kv, 3]];
            let tensors: [Tensor<'_>; 3] = std::array::from_fn(|n| Tensor::dense(&got[n], tensors[n]));
            let d_sink = vec![d_sink; 2];
            let along = [(Tensor { numbers: &d_sink, strides: [0, 0, 0, 1] }, Element::F32)];
            check_gradients(p, d_o, Given::Own, &tensors, if sink { &along } else { &[] }, &|_| ()).passes()
        };
        assert!(backward([0.0; 3], 0.0));
        for n in 0..3 {
            let mut by = [0.0; 3];
            by[n] = 1e-9;
            assert_eq!(backward(by, 0.0), all[n].is_empty(), "gradient {n} of {seq_q} queries and {seq_kv} keys");
        }
        assert_eq!(backward([0.0; 3], 1e-9), !sink);
    }
}
