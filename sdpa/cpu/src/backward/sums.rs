//! Sums of parts that several workers bring: added in the order of their numbers, whoever is first.

use crate::isa::Isa;
use crate::pack::Aligned;
use parking_lot::{Mutex, MutexGuard};
use pulp::{Simd, WithSimd};
use std::collections::BTreeMap;

/// Pieces of memory of one length, used again and again.
#[derive(Debug)]
pub(super) struct Pool {
    len: usize,
    state: Mutex<(Vec<Aligned>, usize)>,
}

impl Pool {
    pub(super) fn new(len: usize) -> Pool {
        Pool { len, state: Mutex::default() }
    }

    /// A piece that holds anything.
    pub(super) fn take(&self) -> Aligned {
        let mut state = self.state.lock();
        state.0.pop().unwrap_or_else(|| {
            state.1 += 1;
            Aligned::new(self.len)
        })
    }

    /// Takes a piece back.
    pub(super) fn give(&self, piece: Aligned) {
        self.state.lock().0.push(piece);
    }

    /// Bytes of all pieces that were made.
    pub(super) fn bytes(&self) -> usize {
        self.state.lock().1 * Aligned::bytes(self.len)
    }
}

/// A sum, and where it goes.
#[derive(Debug)]
pub(super) struct Sum<Target> {
    n_parts: usize,
    state: Mutex<State<Target>>,
}

#[derive(Debug)]
struct State<Target> {
    target: Option<Target>,
    sum: Option<Aligned>,
    /// How many parts are in the sum, and those that are not yet.
    added: usize,
    waiting: BTreeMap<usize, Aligned>,
    /// Somebody is adding.
    busy: bool,
}

impl<Target> Sum<Target> {
    pub(super) fn new(n_parts: usize, target: Target) -> Sum<Target> {
        let state = State { target: Some(target), sum: None, added: 0, waiting: BTreeMap::new(), busy: false };
        Sum { n_parts, state: Mutex::new(state) }
    }

    /// Takes a part. Nobody waits for an earlier one: who finds it there adds what follows. The whole sum comes out with
    /// the last part.
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
        // In any other order the result differs.
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
