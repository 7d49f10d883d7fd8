use crate::exec::cpu::CpuExecutor;
use crate::exec::cpu::element::Element;
use crate::exec::cpu::isa::Isa;
use crate::*;
use half::*;

fn one<T: Element + Default>(
    dtype: DType,
    shape: [i64; 7],
    layout: Layout,
    masks: Vec<Mask>,
    isa: Isa,
    el: impl Fn(&[T]) -> Elements<'_>,
    elm: impl Fn(&mut [T]) -> ElementsMut<'_>,
    n: usize,
) {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = shape;
    let mut spec = AttentionSpec::dense(dtype, Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v }, layout).with_stats();
    spec.masks = masks;
    let problem = spec.backward().validate().unwrap();
    let fwd = spec.validate().unwrap();
    let mut st = 1u64;
    let mut fill = |n: i64| -> Vec<T> {
        let x: Vec<f32> = (0..n)
            .map(|_| {
                st = st.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (st >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect();
        let mut y = vec![T::default(); x.len()];
        T::narrow(&x, 1.0, &mut y);
        y
    };
    let q = fill(fwd.q().extent().unwrap());
    let k = fill(fwd.k().extent().unwrap());
    let v = fill(fwd.v().extent().unwrap());
    let mut o = fill(fwd.o().extent().unwrap());
    let d_o = fill(fwd.o().extent().unwrap());
    let mut stats = vec![0.0; fwd.stats_elements() as usize];
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let exec = CpuExecutor::with_isa(isa);
    let f = exec.prepare(&fwd).unwrap();
    let b = exec.prepare_backward(&problem).unwrap();
    let (mut tf, mut tb) = (vec![], vec![]);
    let mut rep = Report::default();
    for _ in 0..n {
        let r = f
            .forward(HostForward {
                q: el(&q),
                k: el(&k),
                v: el(&v),
                o: elm(&mut o),
                stats: Some(&mut stats),
                attn_scale: None,
                params: &[],
            })
            .unwrap();
        tf.push(r.compute_ms);
        rep = b
            .backward(HostBackward {
                q: el(&q),
                k: el(&k),
                v: el(&v),
                o: el(&o),
                d_o: el(&d_o),
                stats: &stats,
                dq: elm(&mut dq),
                dk: elm(&mut dk),
                dv: elm(&mut dv),
                attn_scale: None,
                params: &[],
                gradients: Vec::new(),
            })
            .unwrap();
        tb.push(rep.compute_ms);
    }
    tf.sort_by(f64::total_cmp);
    tb.sort_by(f64::total_cmp);
    let (gf, gb) = (fwd.flops() / tf[0] / 1e6, problem.flops() / tb[0] / 1e6);
    println!(
        "{dtype:?} {shape:?} {:?}: fwd {:.2} (med {:.2}) {:.0} GF; bwd {:.2} (med {:.2}) {:.0} GF; ratio {:.2} {} {}",
        spec.masks.len(),
        tf[0],
        tf[n / 2],
        gf,
        tb[0],
        tb[n / 2],
        gb,
        gb / gf,
        rep.engine,
        rep.workspace_bytes
    );
}

#[test]
fn speed() {
    let isa = match std::env::var("BISA").as_deref() {
        Ok("v3") => Isa::all()[1],
        Ok("p") => Isa::Portable,
        _ => Isa::detect(),
    };
    for (shape, masks, n) in [
        ([1, 8, 8, 1024, 1024, 64, 64], vec![], 40),
        ([1, 8, 8, 1024, 1024, 64, 64], vec![Mask::causal()], 40),
        ([1, 16, 16, 2048, 2048, 64, 64], vec![], 8),
        ([1, 16, 4, 2048, 2048, 128, 128], vec![], 6),
        ([1, 1, 1, 1024, 1024, 64, 64], vec![], 100),
        ([1, 1, 1, 512, 512, 64, 64], vec![], 100),
        ([1, 1, 1, 256, 256, 64, 64], vec![], 100),
        ([8, 12, 12, 128, 128, 64, 64], vec![], 60),
        ([1, 4, 4, 1024, 1024, 256, 256], vec![], 10),
    ] {
        one::<f32>(DType::F32, shape, Layout::Bhsd, masks, isa, |x| Elements::F32(x), |x| ElementsMut::F32(x), n);
    }
    for (shape, masks, n) in [([1, 8, 8, 1024, 1024, 64, 64], vec![], 40), ([1, 16, 4, 2048, 2048, 128, 128], vec![Mask::causal()], 6)] {
        one::<bf16>(DType::BF16, shape, Layout::Bshd, masks.clone(), isa, |x| Elements::BF16(x), |x| ElementsMut::BF16(x), n);
        one::<f16>(DType::F16, shape, Layout::Bshd, masks, isa, |x| Elements::F16(x), |x| ElementsMut::F16(x), n);
    }
}
