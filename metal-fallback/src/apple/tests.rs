//! Tests of the Metal glue that need a Mac. The workspace's cases test the kernels' results.

use super::*;
use crate::error::Error;
use crate::kernel::Math;
use crate::plan::Operand;
use crate::run::{Call, Contents, Runner};
use crate::unsupported::Unavailable;
use crate::{Forward, Task};
use objc2_metal::{MTLCommandBuffer, MTLCommandQueue, MTLDevice, MTLResourceOptions};
use sdpa_core::{DType, Ends, Region, TensorSpec};
use std::borrow::Cow;
use std::ffi::c_void;
use std::ptr::NonNull;

const PAGE: usize = 16 * 1024;
/// Bytes of each tensor: four heads of 64 rows of 64 floats, a whole number of pages.
const BYTES: usize = 4 * 64 * 64 * 4;

/// Page-aligned memory.
struct Pages {
    start: NonNull<u8>,
    layout: std::alloc::Layout,
}

impl Pages {
    fn of(floats: impl Iterator<Item = f32>) -> Pages {
        let layout = std::alloc::Layout::from_size_align(BYTES, PAGE).unwrap();
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        let mut pages = Pages { start, layout };
        pages.bytes().as_chunks_mut::<4>().0.iter_mut().zip(floats).for_each(|(to, x)| *to = x.to_ne_bytes());
        pages
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this value's own memory, initialised with zeros, while it is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Returns the GPU, or skips the test.
fn gpu() -> Option<Gpu> {
    let said = |why: Unavailable| {
        assert!(!std::env::var("SDPA_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name == "metal")), "{why}");
        println!("SKIP metal: the glue: {why}");
    };
    Gpu::system().map_err(said).ok()
}

fn task() -> Task {
    let tensor = TensorSpec { dims: [1, 4, 64, 64], strides: [4 * 64 * 64, 64 * 64, 64, 1], alignment: 16 };
    let band = Region { upper: Some(0), ..Region::default() };
    let dtype = DType::F32;
    let forward = Forward {
        dtype,
        q: tensor,
        k: tensor,
        v: tensor,
        o: tensor,
        band,
        ends: Ends::default(),
        seq_len_q: false,
        seq_len_kv: false,
        packed: None,
        paged: None,
        score_mod: None,
        keep: None,
        sink: false,
        dropout: None,
        stats: false,
        row_max: false,
        sum_exp: false,
    };
    forward.task(None).unwrap()
}

fn operands() -> [Pages; 3] {
    [3, 5, 7].map(|step| Pages::of((0..).map(move |n| ((n * step) % 17) as f32 / 8.0 - 1.0)))
}

fn run(gpu: &Gpu, [q, k, v]: [&[u8]; 3], o: &mut [u8]) -> crate::Ran {
    let read = |bytes| Contents::Read(Cow::Borrowed(bytes));
    let operands = vec![(Operand::Q, read(q)), (Operand::K, read(k)), (Operand::V, read(v)), (Operand::O, Contents::Written(o))];
    gpu.prepare(task()).unwrap().run(Call { attn_scale: 0.125, tokens: None, operands }).unwrap()
}

/// Returns the output for copied operands.
fn expected(gpu: &Gpu) -> Vec<u8> {
    let [mut q, mut k, mut v] = operands();
    // Shifted by a byte, no operand is page-aligned.
    let shifted = |pages: &mut Pages| [&[0], &*pages.bytes()].concat();
    let [q, k, v] = [shifted(&mut q), shifted(&mut k), shifted(&mut v)];
    let mut o = vec![0xff; BYTES + 1];
    let ran = run(gpu, [&q[1..], &k[1..], &v[1..]], &mut o[1..]);
    assert_eq!(ran.copied, [Operand::Q, Operand::K, Operand::V, Operand::O]);
    assert!(ran.kernels > std::time::Duration::ZERO, "{ran:?}");
    let o = o.split_off(1);
    assert!(o.as_chunks::<4>().0.iter().all(|x| f32::from_ne_bytes(*x).abs() <= 1.0));
    o
}

#[test]
fn whole_pages_are_not_copied_and_give_the_same() {
    let Some(gpu) = gpu() else { return };
    let [mut q, mut k, mut v] = operands();
    let mut o = Pages::of(std::iter::repeat(f32::NAN));
    let ran = run(&gpu, [q.bytes(), k.bytes(), v.bytes()], o.bytes());
    assert_eq!(ran.copied, []);
    assert!(o.bytes() == expected(&gpu));
    let stats = gpu.cache_stats();
    assert_eq!((stats.hits, stats.misses, stats.evictions), (1, 1, 0));
}

#[test]
fn a_command_buffer_of_the_callers_gives_the_same() {
    let Some(gpu) = gpu() else { return };
    let shared = MTLResourceOptions::StorageModeShared;
    let buffers = operands().map(|mut pages| {
        let bytes = pages.bytes();
        // SAFETY: a slice that Metal copies.
        unsafe { gpu.device().newBufferWithBytes_length_options(NonNull::from(&*bytes).cast::<c_void>(), BYTES, shared) }.unwrap()
    });
    // The output begins inside its buffer.
    let o = gpu.device().newBufferWithLength_options(BYTES + 64, shared).unwrap();
    let argument = |operand: &Operand| {
        let place = [Operand::Q, Operand::K, Operand::V].iter().position(|o| o == operand);
        let found = place.map(|at| Argument::Buffer { buffer: &buffers[at], offset: 0 });
        found.or((*operand == Operand::O).then_some(Argument::Buffer { buffer: &o, offset: 64 }))
    };
    let built = gpu.build(task()).unwrap();
    let queue = gpu.device().newCommandQueue().unwrap();
    let commands = queue.commandBufferWithUnretainedReferences().unwrap();
    // SAFETY: a new command buffer of this GPU; everything lives until the wait below.
    let kept = unsafe { built.encode(&commands, 0.125, None, &argument) }.unwrap();
    commands.commit();
    commands.waitUntilCompleted();
    drop(kept);
    // SAFETY: shared memory of this length, which no kernel writes any more.
    let written = unsafe { std::slice::from_raw_parts(o.contents().cast::<u8>().as_ptr().add(64), BYTES) };
    assert!(written == expected(&gpu));

    let short = |operand: &Operand| argument(operand).filter(|_| *operand != Operand::V);
    let commands = queue.commandBuffer().unwrap();
    // SAFETY: as above; nothing is encoded.
    let refused = unsafe { built.encode(&commands, 0.125, None, &short) }.unwrap_err();
    assert!(matches!(&refused, Error::Operand { operand, .. } if operand == "v"), "{refused}");
}

#[test]
fn a_source_that_does_not_compile_is_an_error_in_metals_words() {
    let Some(gpu) = gpu() else { return };
    let broken = task().map_plans(|mut plan| {
        plan.source.push_str("\nnot MSL\n");
        plan
    });
    let refused = gpu.prepare(broken).unwrap_err();
    assert!(matches!(&refused, Error::Compile { text, .. } if text.contains("error")), "{refused}");
    assert_eq!(gpu.cache_stats().failures, 1);
}

#[test]
fn a_bound_on_kernels_evicts() {
    let Some(found) = gpu() else { return };
    let gpu = Gpu::new(found.device.clone(), std::num::NonZeroUsize::MIN, Math::Safe).unwrap();
    let other = task().map_plans(|mut plan| {
        plan.source.push_str("\n// another\n");
        plan
    });
    for task in [task(), other, task()] {
        gpu.prepare(task).unwrap();
    }
    let stats = gpu.cache_stats();
    assert_eq!((stats.hits, stats.misses, stats.evictions), (0, 3, 2));
}
