//! Keys in pages over device memory, where nobody looks at the table: pages that no entry has may hold anything, and whatever the table and the lengths say,
//! nothing beside the containers is touched.

use super::documents::{up, whole};
use super::{executor, mma};
use conformance::emulated::{faulty, submit};
use conformance::random::Random;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceForward, DeviceParam, DeviceValue};
use sdpa::{AttentionSpec, DType, DeviceExecutor, Mask, Paged, Shape};

const PAGES: usize = 40;
const SHAPE: Shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 2, seq_kv: 600, dim_qk: 64, dim_v: 64 };
/// Entries of the table for each batch entry.
fn each(page: usize) -> usize {
    600_usize.div_ceil(page)
}

/// Elements of a page.
fn of_page(page: usize) -> usize {
    page * 2 * 64
}

/// The executors of both families, with a size of pages each.
fn both() -> impl Iterator<Item = (CudaExecutor, usize)> {
    [(executor(), 16), (mma::executor(), 17)].into_iter().filter_map(|(executor, page)| Some((executor?, page)))
}

struct Cache {
    page: usize,
    table: Vec<i32>,
    lengths: [i32; 3],
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Cache {
    fn drawn(page: usize, lengths: [i32; 3], entry: impl Fn(usize) -> i32) -> Cache {
        let mut random = Random::new(17);
        let [k, v] = [(); 2].map(|()| (0..PAGES * of_page(page)).map(|_| bf16::from_f64(random.normal())).collect());
        Cache { page, table: (0..3 * each(page)).map(entry).collect(), lengths, k, v }
    }

    /// The output, as bits.
    fn run(&self, executor: &CudaExecutor) -> Result<Vec<u16>, sdpa::Error> {
        let paged = Paged::new(self.page as i64, PAGES as i64);
        let spec = AttentionSpec::paged(DType::BF16, SHAPE, paged).mask(Mask::padding());
        let stream = executor.device().stream().unwrap();
        let mut random = Random::new(5);
        let queries: Vec<bf16> = (0..3 * 2 * 4 * 64).map(|_| bf16::from_f64(random.normal())).collect();
        let mut results = vec![bf16::NAN; queries.len()];
        let [q, k, v, o] = [&queries, &self.k, &self.v, &results].map(|x| up(executor, &stream, x));
        let numbers = [&[2, 2, 2][..], &self.lengths, &self.table].map(|x| up(executor, &stream, x));
        let names = ["seq_len_q", "seq_len_kv", "page_table"];
        let param = |n: usize| DeviceParam::new(names[n], DeviceValue::Tensor(DType::I32, whole(&numbers[n])));
        let params = [param(0), param(1), param(2)];
        let call = DeviceForward::new(whole(&q), whole(&k), whole(&v), whole(&o)).params(&params);
        submit(&*executor.prepare_device(&spec.validate().unwrap()).unwrap(), &stream, &(&call).into())?;
        o.download(&stream, 0, &mut results).unwrap();
        Ok(results.into_iter().map(bf16::to_bits).collect())
    }
}

#[test]
fn pages_that_no_entry_has_may_hold_anything() {
    for (executor, page) in both() {
        // Whole pages, so that no page has tokens behind the last key.
        let lengths = [13 * page as i32, 0, 22 * page as i32];
        let each = each(page);
        let pages = |n: usize| match (n / each, n % each) {
            (0, page) if page < 13 => (page as i32 * 7) % 13,
            (2, page) if page < 22 => 39 - page as i32,
            _ => -1,
        };
        let right = Cache::drawn(page, lengths, pages);
        let mut spoiled = Cache::drawn(page, lengths, |n| if pages(n) < 0 { 14 + n as i32 % 3 } else { pages(n) });
        let of_page = of_page(page);
        for page in 13..18 {
            [&mut spoiled.k, &mut spoiled.v].into_iter().for_each(|x| x[page * of_page..(page + 1) * of_page].fill(bf16::NAN));
        }
        let [right, spoiled] = [right, spoiled].map(|cache| cache.run(&executor).unwrap_or_else(|e| panic!("{e}")));
        assert!(right == spoiled);
        assert!(right.iter().all(|bits| !bf16::from_bits(*bits).is_nan()));
    }
}

/// Threads that ask for rows themselves leave out those behind the last key: what the last page holds there is no matter.
#[test]
fn what_is_behind_the_last_key_of_a_page_may_be_anything_where_threads_bring_it() {
    let Some(executor) = mma::executor() else { return };
    let (page, lengths) = (17, [100, 5, 17]);
    let entry = |n: usize| (n % each(page)) as i32 + 10 * (n / each(page)) as i32;
    let right = Cache::drawn(page, lengths, entry);
    let mut spoiled = Cache::drawn(page, lengths, entry);
    for (n, length) in lengths.into_iter().enumerate() {
        let (first, past) = ((10 * n * page + length as usize) * 128, (10 * n + 10) * page * 128);
        [&mut spoiled.k, &mut spoiled.v].into_iter().for_each(|x| x[first..past].fill(bf16::NAN));
    }
    let results = |cache: &Cache, executor: &CudaExecutor| cache.run(executor).unwrap_or_else(|e| panic!("{e}"));
    assert!(results(&right, &executor) == results(&spoiled, &executor));
    // Rows of whole blocks are brought.
    let (Some(other), fault) = (mma::executor(), ["seq_info_of(p, tile.batch).len_kv, dim, in_page", "p.seq_kv, dim, in_page"]) else {
        return;
    };
    assert!(results(&right, &executor) != faulty(fault, || results(&spoiled, &other)));
}

#[test]
fn whatever_tables_and_lengths_say_nothing_beside_the_containers_is_touched() {
    for (executor, page) in both() {
        for lengths in [[i32::MAX, 600, 601], [i32::MIN, -1, 17], [599, 16, 1]] {
            for pages in [i32::MIN, -1, PAGES as i32, i32::MAX, 1 << 28] {
                let cache = Cache::drawn(page, lengths, |n| if n % 3 == 0 { pages } else { n as i32 % PAGES as i32 });
                let written = cache.run(&executor).unwrap_or_else(|e| panic!("pages {pages}, lengths {lengths:?}: {e}"));
                assert!(written.iter().all(|bits| !bf16::from_bits(*bits).is_nan()));
            }
        }
    }
}
