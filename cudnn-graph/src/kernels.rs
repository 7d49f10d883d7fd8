//! Kernel caches of cuDNN: compiled kernels that plans share whose graphs differ in extents alone.

use crate::error::Error;
use crate::ffi::Library;
use crate::ffi::codes::Attribute;
use crate::ffi::descriptor::Descriptor;
use crate::ir::ty::Strides;
use crate::ir::{Graph, Verified};
use parking_lot::Mutex;
use sdpa_driver::Device;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most structures whose kernels are kept.
const STRUCTURES: usize = 256;

/// Counts of plans whose shapes are dynamic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelStats {
    /// Structures of graphs for which kernels are kept: graphs that differ in extents alone have one structure.
    pub structures: u64,
    /// Plans for which cuDNN compiled kernels.
    pub compiled: u64,
    /// Plans that took the kernels of an earlier plan.
    pub reused: u64,
}

impl Verified {
    /// Returns the printed graph without its extents and with the order of its strides, not their values. An extent of 1 stays, because it is broadcast.
    /// Graphs of one structure share kernels if their shapes are [dynamic](crate::Policy::dynamic_shapes).
    pub fn structure(&self) -> String {
        structure(self.graph().clone())
    }
}

fn structure(mut graph: Graph) -> String {
    for tensor in &mut graph.tensors {
        let mut order: Vec<i64> = (0..).take(tensor.strides.0.len()).collect();
        order.sort_by_key(|&axis| tensor.strides.0.get(axis as usize).copied());
        tensor.strides = Strides(order);
        tensor.dims.0.iter_mut().for_each(|n| *n = (*n).min(2));
    }
    graph.to_string()
}

/// The kernels of one structure on one device.
#[derive(Debug, Default)]
pub(crate) struct KernelCache {
    /// `None` until the first plan. Plans are built one after another: cuDNN does not say that threads may share a cache.
    made: Mutex<Option<Made>>,
    compiled: AtomicU64,
    reused: AtomicU64,
}

#[derive(Debug)]
struct Made {
    cache: Descriptor,
    /// The operation graph of the first plan, to which the cache refers, and the descriptors to which that refers.
    _graph: Arc<Vec<Descriptor>>,
}

impl KernelCache {
    /// Finalizes a plan of an engine configuration of a graph, with the kernels of the cache if it has them. Returns whether it had.
    ///
    /// # Errors
    /// Returns cuDNN's error.
    pub(crate) fn finalize(
        &self,
        library: &'static Library,
        device: Option<&'static Device>,
        graph: &Arc<Vec<Descriptor>>,
        config: &Descriptor,
        (plan, subject): (&mut Descriptor, &str),
    ) -> Result<bool, Error> {
        let mut made = self.made.lock();
        let made = match &mut *made {
            Some(made) => made,
            none => {
                let mut cache = Descriptor::kernel_cache(library, device)?;
                if let Some(graph) = graph.last() {
                    cache.set_descriptor(Attribute::KERNEL_CACHE_OPERATION_GRAPH, graph)?;
                }
                cache.finalize("of a structure")?;
                none.insert(Made { cache, _graph: graph.clone() })
            }
        };
        let reused = made.cache.has(Attribute::KERNEL_CACHE_IS_ENGINECFG_KERNEL_CACHED, config)?;
        plan.set_descriptor(Attribute::EXECUTION_PLAN_KERNEL_CACHE, &made.cache)?;
        plan.finalize(subject)?;
        let counter = if reused { &self.reused } else { &self.compiled };
        counter.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(subject, reused, "kernels of a plan with dynamic shapes");
        Ok(reused)
    }

    /// Returns the number of plans for which cuDNN compiled kernels, and of those that took them.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.compiled.load(Ordering::Relaxed), self.reused.load(Ordering::Relaxed))
    }
}

/// The kernel caches of all structures, least recently used first.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    all: Mutex<VecDeque<(String, Arc<KernelCache>)>>,
    /// Counts of the caches that are no longer kept.
    gone: Mutex<KernelStats>,
}

impl Kernels {
    fn key(graph: &Verified, device: &str) -> String {
        format!("{device}\n{}", graph.structure())
    }

    /// Returns the kernels of a graph's structure on a device; `None` if no plan of it was built.
    pub(crate) fn find(&self, graph: &Verified, device: &str) -> Option<Arc<KernelCache>> {
        let key = Kernels::key(graph, device);
        self.all.lock().iter().find(|(other, _)| *other == key).map(|(_, cache)| cache.clone())
    }

    /// Returns the kernels of a graph's structure on a device, at first none. Plans keep the kernels that they use.
    pub(crate) fn of(&self, graph: &Verified, device: &str) -> Arc<KernelCache> {
        let key = Kernels::key(graph, device);
        let mut all = self.all.lock();
        let found = all.iter().position(|(other, _)| *other == key).and_then(|at| all.remove(at));
        let entry = found.unwrap_or_else(|| (key, Arc::default()));
        let cache = entry.1.clone();
        all.push_back(entry);
        let old = if all.len() > STRUCTURES { all.pop_front() } else { None };
        drop(all);
        old.iter().for_each(|(_, cache)| self.forget(cache));
        cache
    }

    fn forget(&self, cache: &KernelCache) {
        let (compiled, reused) = cache.counts();
        let mut gone = self.gone.lock();
        gone.compiled += compiled;
        gone.reused += reused;
    }

    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.all.lock());
        all.iter().for_each(|(_, cache)| self.forget(cache));
    }

    pub(crate) fn stats(&self) -> KernelStats {
        let all = self.all.lock();
        let mut stats = KernelStats { structures: all.len() as u64, ..*self.gone.lock() };
        for (_, cache) in all.iter() {
            let (compiled, reused) = cache.counts();
            stats.compiled += compiled;
            stats.reused += reused;
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ir::Tensor;

    fn product(rows: i64, inner: i64, transposed: bool) -> Verified {
        let mut g = Graph::new();
        let a = g.tensor(if transposed {
            Tensor::device("a", DType::F16, [2, rows, inner]).strides([rows * inner, 1, rows])
        } else {
            Tensor::device("a", DType::F16, [2, rows, inner])
        });
        let b = g.input("b", DType::F16, [2, inner, 8]);
        let y = g.matmul(a, b);
        g.output(y, "y", DType::F16);
        g.verify().unwrap()
    }

    #[test]
    fn a_structure_has_no_extents_but_ones() {
        let of = |rows, inner, transposed| product(rows, inner, transposed).structure();
        assert_eq!(of(8, 16, false), of(24, 40, false));
        assert_ne!(of(8, 16, false), of(8, 16, true));
        assert_ne!(of(8, 16, false), of(1, 16, false));
    }

    #[test]
    fn caches_are_one_per_structure_and_device_and_the_oldest_goes() {
        let kernels = Kernels::default();
        let graph = product(8, 16, false);
        assert!(kernels.find(&graph, "a").is_none());
        let first = kernels.of(&graph, "a");
        first.compiled.store(3, Ordering::Relaxed);
        assert!(Arc::ptr_eq(&first, &kernels.of(&product(24, 40, false), "a")));
        assert!(!Arc::ptr_eq(&first, &kernels.of(&graph, "b")));
        for n in 0..STRUCTURES - 2 {
            kernels.of(&graph, &n.to_string());
        }
        assert!(kernels.find(&graph, "a").is_some());
        // A use makes it the newest.
        kernels.of(&graph, "a");
        kernels.of(&graph, "one more");
        assert!(kernels.find(&graph, "a").is_some() && kernels.find(&graph, "b").is_none());
        for n in 0..STRUCTURES {
            kernels.of(&graph, &format!("other {n}"));
        }
        assert!(kernels.find(&graph, "a").is_none());
        assert_eq!(kernels.stats(), KernelStats { structures: STRUCTURES as u64, compiled: 3, reused: 0 });
    }
}
