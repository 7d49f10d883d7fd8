//! Sums of parts from several workers, added in the order of their indices, independent of which worker finishes first.

use crate::isa::Isa;
use crate::pack::Aligned;
use parking_lot::{Mutex, MutexGuard};
use pulp::{Simd, WithSimd};
use std::collections::BTreeMap;

/// Reusable allocations of one length.
#[derive(Debug)]
pub(super) struct Pool {
    len: usize,
    state: Mutex<(Vec<Aligned>, usize)>,
}

impl Pool {
    pub(super) fn new(len: usize) -> Pool {
        Pool { len, state: Mutex::default() }
    }

    /// Returns an allocation with undefined contents.
    pub(super) fn take(&self) -> Aligned {
        let mut state = self.state.lock();
        state.0.pop().unwrap_or_else(|| {
            state.1 += 1;
            Aligned::new(self.len)
        })
    }

    /// Returns an allocation to the pool.
    pub(super) fn give(&self, piece: Aligned) {
        self.state.lock().0.push(piece);
    }

    /// Returns the bytes of all allocations.
    pub(super) fn bytes(&self) -> usize {
        self.state.lock().1 * Aligned::bytes(self.len)
    }
}

/// A sum, and its destination.
#[derive(Debug)]
pub(super) struct Sum<Target> {
    n_parts: usize,
    state: Mutex<State<Target>>,
}

#[derive(Debug)]
struct State<Target> {
    target: Option<Target>,
    sum: Option<Aligned>,
    /// Number of parts in the sum, and the parts that wait for an earlier one.
    added: usize,
    waiting: BTreeMap<usize, Aligned>,
    /// Whether a worker is adding.
    busy: bool,
}

impl<Target> Sum<Target> {
    pub(super) fn new(n_parts: usize, target: Target) -> Sum<Target> {
        let state = State { target: Some(target), sum: None, added: 0, waiting: BTreeMap::new(), busy: false };
        Sum { n_parts, state: Mutex::new(state) }
    }

    /// Adds a part. No worker waits for an earlier part: the worker that adds that part also adds those that follow. Returns the complete sum after the last
    /// part.
    pub(super) fn add(&self, isa: Isa, pool: &Pool, number: usize, part: Aligned) -> Option<(Target, Aligned)> {
        let mut state = self.state.lock();
        state.waiting.insert(number, part);
        if state.busy {
            return None;
        }
        while let State { waiting, added, .. } = &mut *state
            && let Some(part) = waiting.remove(added)
        {
            state.added += 1;
            let Some(mut sum) = state.sum.take() else {
                state.sum = Some(part);
                continue;
            };
            state.busy = true;
            MutexGuard::unlocked(&mut state, || {
                isa.run(Add { from: part.get(), to: sum.get_mut() });
                pool.give(part);
            });
            state.busy = false;
            state.sum = Some(sum);
        }
        if state.added == self.n_parts { state.target.take().zip(state.sum.take()) } else { None }
    }
}

/// `to += from`.
#[derive(Debug)]
struct Add<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
}

impl WithSimd for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to += from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_added_in_their_order_whoever_is_first() {
        // In f32, other orders of these parts give other sums.
        let parts = [1.0f32, 1e8, -1e8, 3.0];
        let want = parts.iter().sum::<f32>();
        let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]];
        for order in orders {
            let pool = Pool::new(5);
            let sum = Sum::new(parts.len(), "target");
            let mut done = Vec::new();
            for number in order {
                let mut part = pool.take();
                part.get_mut().fill(parts[number]);
                done.extend(sum.add(Isa::detect(), &pool, number, part));
            }
            let [(target, total)] = &done[..] else { panic!("{} sums", done.len()) };
            assert_eq!(*target, "target");
            assert!(total.get().iter().all(|x| *x == want), "{order:?}: {total:?}");
        }
    }

    #[test]
    fn memory_is_used_again() {
        let pool = Pool::new(100);
        for _ in 0..3 {
            let (a, b) = (pool.take(), pool.take());
            pool.give(a);
            pool.give(b);
        }
        assert_eq!(pool.bytes(), 2 * Aligned::bytes(100));
    }
}
