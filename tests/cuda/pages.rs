//! Keys in pages over device memory, where nobody looks at the table: pages that no entry has may hold anything, and whatever the table and the lengths say,
//! nothing beside the containers is touched.

use super::documents::{up, whole};
use super::executor;
use conformance::emulated::submit;
use conformance::random::Random;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceForward, DeviceParam, DeviceValue};
use sdpa::{AttentionSpec, DType, DeviceExecutor, Mask, Paged, Shape};

const PAGE: usize = 16;
const PAGES: usize = 40;
const SHAPE: Shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 2, seq_kv: 600, dim_qk: 64, dim_v: 64 };
/// Entries of the table for each batch entry.
const EACH: usize = 600_usize.div_ceil(PAGE);
/// Elements of a page.
const OF_PAGE: usize = PAGE * 2 * 64;

struct Cache {
    table: Vec<i32>,
    lengths: [i32; 3],
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Cache {
    fn drawn(lengths: [i32; 3], entry: impl Fn(usize) -> i32) -> Cache {
        let mut random = Random::new(17);
        let [k, v] = [(); 2].map(|()| (0..PAGES * OF_PAGE).map(|_| bf16::from_f64(random.normal())).collect());
        Cache { table: (0..3 * EACH).map(entry).collect(), lengths, k, v }
    }

    /// The output, as bits.
    fn run(&self, executor: &CudaExecutor) -> Result<Vec<u16>, sdpa::Error> {
        let paged = Paged { page_size: PAGE as i64, pages: PAGES as i64 };
        let spec = AttentionSpec::paged(DType::BF16, SHAPE, paged).mask(Mask::padding());
        let stream = executor.device().stream().unwrap();
        let mut random = Random::new(5);
        let queries: Vec<bf16> = (0..3 * 2 * 4 * 64).map(|_| bf16::from_f64(random.normal())).collect();
        let mut results = vec![bf16::NAN; queries.len()];
        let [q, k, v, o] = [&queries, &self.k, &self.v, &results].map(|x| up(executor, &stream, x));
        let numbers = [&[2, 2, 2][..], &self.lengths, &self.table].map(|x| up(executor, &stream, x));
        let names = ["seq_len_q", "seq_len_kv", "page_table"];
        let param = |n: usize| DeviceParam { name: names[n], value: DeviceValue::Tensor(DType::I32, whole(&numbers[n])) };
        let params = [param(0), param(1), param(2)];
        let call = DeviceForward {
            q: whole(&q),
            k: whole(&k),
            v: whole(&v),
            o: whole(&o),
            stats: None,
            row_max: None,
            sum_exp: None,
            amax: &[],
            attn_scale: None,
            params: &params,
            workspace: None,
        };
        submit(&*executor.prepare_device(&spec.validate().unwrap()).unwrap(), &stream, &(&call).into())?;
        o.download(&stream, 0, &mut results).unwrap();
        Ok(results.into_iter().map(bf16::to_bits).collect())
    }
}

#[test]
fn pages_that_no_entry_has_may_hold_anything() {
    let Some(executor) = executor() else { return };
    // Whole pages, so that no page has tokens behind the last key.
    let lengths = [208, 0, 352];
    let pages = |n: usize| match (n / EACH, n % EACH) {
        (0, page) if page < 13 => (page as i32 * 7) % 13,
        (2, page) if page < 22 => 39 - page as i32,
        _ => -1,
    };
    let right = Cache::drawn(lengths, pages);
    let mut spoiled = Cache::drawn(lengths, |n| if pages(n) < 0 { 14 + n as i32 % 3 } else { pages(n) });
    for page in 13..18 {
        [&mut spoiled.k, &mut spoiled.v].into_iter().for_each(|x| x[page * OF_PAGE..(page + 1) * OF_PAGE].fill(bf16::NAN));
    }
    let [right, spoiled] = [right, spoiled].map(|cache| cache.run(&executor).unwrap_or_else(|e| panic!("{e}")));
    assert!(right == spoiled);
    assert!(right.iter().all(|bits| !bf16::from_bits(*bits).is_nan()));
}

#[test]
fn whatever_tables_and_lengths_say_nothing_beside_the_containers_is_touched() {
    let Some(executor) = executor() else { return };
    for lengths in [[i32::MAX, 600, 601], [i32::MIN, -1, 17], [599, 16, 1]] {
        for pages in [i32::MIN, -1, PAGES as i32, i32::MAX, 1 << 28] {
            let cache = Cache::drawn(lengths, |n| if n % 3 == 0 { pages } else { n as i32 % PAGES as i32 });
            let written = cache.run(&executor).unwrap_or_else(|e| panic!("pages {pages}, lengths {lengths:?}: {e}"));
            assert!(written.iter().all(|bits| !bf16::from_bits(*bits).is_nan()));
        }
    }
}
