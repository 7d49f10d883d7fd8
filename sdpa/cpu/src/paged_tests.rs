//! A paged KV cache on every instruction set: against the textbook over the keys of its pages, and calls with an invalid page table.

use super::CpuExecutor;
use super::isa::Isa;
use crate::tests::{Random, Tensor, at_ends, forward_with, indices, masks, of_rows, round, told, with_gaps};
use sdpa_core::executor::Executor;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::{AttentionSpec, DType, Elements, Error, HostForward, Layout, Mask, Paged, Param, Problem, Shape, TensorSpec};

/// Contents of the page table after the last key of an entry.
const ANYTHING: [i32; 4] = [-1, i32::MAX, i32::MIN, 0];

/// Lengths and pages of a problem.
struct Cache {
    queries: Vec<i32>,
    keys: Vec<i32>,
    table: Vec<i32>,
}

impl Cache {
    /// Draws pages in any order, or in the order of the keys. Entries share some pages; no entry uses the last ones.
    fn draw(shape: Shape, page_size: i64, padded: bool, random: &mut Random) -> (Cache, Paged) {
        let length = |most: i64, random: &mut Random| {
            let any = random.below(most as usize + 1) as i64;
            random.pick(&[0, most, any, any]) as i32
        };
        let lengths = |most: i64, random: &mut Random| -> Vec<i32> {
            (0..shape.batch).map(|_| if padded { length(most, random) } else { most as i32 }).collect()
        };
        let (queries, keys) = (lengths(shape.seq_q, random), lengths(shape.seq_kv, random));
        let used: usize = keys.iter().map(|&n| (n as usize).div_ceil(page_size as usize)).sum();
        let mut free: Vec<i32> = (0..used as i32).rev().collect();
        if random.below(3) > 0 {
            (1..used).for_each(|n| free.swap(n, random.below(n + 1)));
        }
        let shared = random.below(3) == 0;
        let per_entry = (shape.seq_kv as usize).div_ceil(page_size as usize);
        let mut table: Vec<i32> = Vec::new();
        for &keys in &keys {
            for n in 0..per_entry {
                let there = n * (page_size as usize) < keys as usize;
                let before = table.iter().copied().find(|&page| shared && (0..used as i32).contains(&page) && random.below(3) == 0);
                table.push(if there { before.or_else(|| free.pop()).unwrap_or(0) } else { random.pick(&ANYTHING) });
            }
        }
        (Cache { queries, keys, table }, Paged::new(page_size, used as i64 + 1 + random.below(3) as i64))
    }

    fn params(&self) -> [Param<'_>; 3] {
        [(SEQ_LEN_Q, &self.queries), (SEQ_LEN_KV, &self.keys), (PAGE_TABLE, &self.table)].map(|(name, x)| Param::new(name, x))
    }

    /// Returns the page of a key and its token index.
    fn place(&self, paged: Paged, batch: usize, key: usize) -> [usize; 2] {
        let size = paged.page_size as usize;
        let per_entry = self.table.len() / self.keys.len();
        [self.table[batch * per_entry + key / size] as usize, key % size]
    }

    /// Returns a page pool with NaN outside of the entries' keys, and its keys entry by entry.
    fn fill(&self, spec: &TensorSpec, paged: Paged, dtype: DType, random: &mut Random) -> [Tensor; 2] {
        let mut container = Tensor::new(&paged.container(spec));
        let mut logical = Tensor::new(&TensorSpec::dense(spec.dims, Layout::Bhsd));
        logical.data.fill(0.0);
        let there: Vec<[usize; 4]> = indices(spec).filter(|&[batch, _, key, _]| key < self.keys[batch] as usize).collect();
        for &[batch, head, key, d] in &there {
            let [page, token] = self.place(paged, batch, key);
            container.set([page, head, token, d], round(dtype, random.element()));
        }
        for &[batch, head, key, d] in &there {
            let [page, token] = self.place(paged, batch, key);
            logical.set([batch, head, key, d], container.get([page, head, token, d]) as f32);
        }
        [container, logical]
    }
}

fn random_case(isa: Isa, seed: u64) {
    let random = &mut Random(seed);
    let heads_kv = random.pick(&[1, 2, 3]);
    let shape = Shape {
        batch: random.pick(&[1, 2, 5]),
        heads_q: heads_kv * random.pick(&[1, 2, 8]),
        heads_kv,
        seq_q: random.pick(&[1, 1, 2, 17, 130]),
        seq_kv: random.pick(&[1, 7, 64, 129, 700]),
        dim_qk: random.pick(&[5, 8, 40, 64]),
        dim_v: random.pick(&[1, 8, 24, 72]),
    };
    let (dtype, padded) = (random.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16]), random.below(4) > 0);
    let (cache, paged) = Cache::draw(shape, random.pick(&[1, 3, 7, 16, 64, 128, 1000]), padded, random);
    let mut spec = AttentionSpec::paged(dtype, shape, paged).with_stats().with_row_max().with_sum_exp();
    spec.masks = masks(random, shape.seq_kv);
    if random.below(2) == 0 {
        at_ends(&mut spec.masks);
    }
    if padded {
        spec.masks.push(Mask::padding());
    }
    for tensor in [&mut spec.k, &mut spec.v] {
        let (dims, layout) = (paged.container(tensor).dims, random.pick(&Layout::ALL));
        tensor.strides = if random.below(2) == 0 { with_gaps(dims, layout, random).strides } else { layout.strides(dims) };
        tensor.alignment = 4;
    }
    let problem = spec.validate().unwrap();
    let q = Tensor::random(problem.q(), dtype, random);
    let [k, v] = [problem.k(), problem.v()].map(|spec| cache.fill(spec, paged, dtype, random));
    verify(isa, &problem, &cache, &q, [&k, &v]);
}

/// Compares runs with the oracle, which receives the keys entry by entry.
fn verify(isa: Isa, problem: &Problem, cache: &Cache, q: &Tensor, [[k, of_k], [v, of_v]]: [&[Tensor; 2]; 2]) {
    let params: Vec<Param<'_>> = cache.params().into_iter().filter(|p| problem.params().iter().any(|d| d.name == p.name)).collect();
    let scale = f64::from(problem.default_scale());
    for threads in [1, 3] {
        let (mut o, statistics, report) = forward_with(isa, threads, problem, [q, k, v], (None, &params));
        let there = |[b, _, q, k]: [i64; 4]| q < i64::from(cache.queries[b as usize]) && k < i64::from(cache.keys[b as usize]);
        let lengths = |b: i64| {
            let [queries, keys] = [&cache.queries, &cache.keys].map(|all| i64::from(all[b as usize]));
            if problem.kept().seq_len_kv { [queries, keys] } else { [problem.seq_q(), problem.seq_kv()] }
        };
        let ends = problem.kept().ends;
        let near = |[b, _, q, k]: [i64; 4]| problem.region().keeps(q, k) && ends.keeps(q, k, lengths(b));
        let keep = sdpa_oracle::Mask::Rule(Box::new(move |at| there(at) && near(at)));
        let distance =
            told(problem, [q, of_k, of_v], scale, &[keep], |p| sdpa_oracle::check(p, o.told(), of_rows(problem, &statistics), &|_| ()));
        assert!(distance.passes(), "{isa:?}, {threads} threads, {problem:?}, {:?} of {:?}: {distance:?}", cache.table, cache.keys);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let most = pool.install(|| CpuExecutor::with_isa(isa).workspace_bytes(problem));
        assert!(problem.kept().seq_len_kv || report.workspace_bytes <= most, "{problem:?}");
        o.clear();
        assert!(o.data.iter().all(|x| x.is_nan()), "{isa:?}, {problem:?}: something was written between rows");
    }
}

#[test]
fn keys_are_read_where_the_page_table_says() {
    for isa in Isa::all() {
        for seed in 0..100 {
            random_case(isa, seed * 7_919 + 5);
        }
    }
}

#[test]
fn keys_of_one_entry_are_shared_between_threads_wherever_pages_are_cut() {
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 1, seq_q: 1, seq_kv: 4099, dim_qk: 64, dim_v: 64 };
    for isa in Isa::all() {
        for (seed, page_size) in [(3, 1), (4, 16), (5, 96), (6, 256), (7, 4099)] {
            for dtype in [DType::F32, DType::BF16] {
                let random = &mut Random(seed);
                let (cache, paged) = Cache::draw(shape, page_size, false, random);
                let problem = AttentionSpec::paged(dtype, shape, paged).with_stats().validate().unwrap();
                let q = Tensor::random(problem.q(), dtype, random);
                let [k, v] = [problem.k(), problem.v()].map(|spec| cache.fill(spec, paged, dtype, random));
                verify(isa, &problem, &cache, &q, [&k, &v]);
            }
        }
    }
}

/// A page table, the keys of the entries, the elements of the page pools, and the expected parts of the error.
type Wrong<'a> = (&'a [i32], [i32; 2], usize, &'a [&'a str]);

#[test]
fn a_wrong_page_table_is_told_and_nothing_is_written() {
    let shape = Shape { batch: 2, heads_q: 2, heads_kv: 1, seq_q: 3, seq_kv: 9, dim_qk: 8, dim_v: 8 };
    let problem = AttentionSpec::paged(DType::F32, shape, Paged::new(4, 5)).mask(Mask::padding()).validate().unwrap();
    let container = 5 * 4 * 8;
    let cases: [Wrong<'_>; 6] = [
        (&[0, 1, -1, 2, 3, 4], [9, 9], container, &["parameter page_table[0][2]: got -1, expected between 0 and 4"]),
        (&[5, -1, 0, i32::MAX, 3, i32::MIN], [9, 9], container, &["page_table[0][0]: got 5", "page_table[1][0]: got 2147483647"]),
        (&[0, 1, 2, -1, 3, 4], [9, 1], container, &["page_table[1][0]: got -1"]),
        (
            &[0, 1, 2, 3, 4],
            [9, 9],
            container,
            &["page_table length: got 5, expected 6 elements: in this problem the parameter is a tensor [batch, ceil(k / 4)] of i32"],
        ),
        (
            &[0, 1, 2, 3, 4, 0],
            [9, 9],
            container - 1,
            &["k length: got 159, expected at least 160 elements for 5 pages", "v length: got 159"],
        ),
        (&[0, 1, 9, 3, 4, 0], [9, 9], 0, &["k length", "v length", "page_table[0][2]: got 9"]),
    ];
    for (table, keys, len, rules) in cases {
        let params = [(SEQ_LEN_Q, &[3, 3][..]), (SEQ_LEN_KV, &keys), (PAGE_TABLE, table)];
        let params = params.map(|(name, x)| Param::new(name, x));
        let (q, k, mut o) = (vec![1.0; 96], vec![1.0; len], vec![f32::NAN; 96]);
        let [q, k] = [&q, &k].map(|x| Elements::F32(x));
        let call = HostForward::new(q, k, k, &mut o).params(&params);
        let told = CpuExecutor::new().prepare(&problem).unwrap().forward(call).unwrap_err();
        let right = |errors: &str| errors.lines().count() == rules.len() && rules.iter().all(|rule| errors.contains(rule));
        assert!(matches!(&told, Error::Spec(errors) if right(&errors.to_string())), "{table:?}: {told}");
        assert!(o.iter().all(|x| x.is_nan()), "{table:?}");
    }
}
