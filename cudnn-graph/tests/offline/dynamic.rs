//! Dynamic shapes with the real cuDNN: plans of further extents take the kernels of the first.

use crate::files::product;
use cudnn_graph::ir::{ConvGeometry, Mode};
use cudnn_graph::{DType, DeviceProfile, Folder, Graph, KernelStats, Library, Limits, Plans, Policy, Target, Verified};
use std::sync::Arc;

fn convolution(images: i64, extent: i64) -> Arc<Verified> {
    let mut g = Graph::new();
    let (x, w) =
        (g.input_channels_last("x", DType::F16, [images, 64, extent, extent]), g.input_channels_last("w", DType::F16, [64, 64, 3, 3]));
    let y = g.convolution(x, w, ConvGeometry::new(2).padding([1, 1]));
    g.output(y, "y", DType::F16);
    Arc::new(g.verify().unwrap())
}

pub(crate) fn further_extents_compile_no_kernel(library: &'static Library) {
    let (h200, a100) = (DeviceProfile::named("h200").unwrap(), DeviceProfile::named("a100").unwrap());
    let target = Target::Profile(&h200);
    let plans = Plans::new(library, Policy::default().with_dynamic_shapes(true), Limits::default());
    let reused = |graph: &Arc<Verified>, target: &Target<'_>| plans.get(graph, target).unwrap().kernels_reused();
    let said = |graph: &Verified| plans.explain(graph, &target).notes.join("\n");

    assert!(said(&product(256, Mode::ReluFwd)).starts_with("no kernels were compiled"));
    assert_eq!(reused(&product(256, Mode::ReluFwd), &target), Some(false));
    let note = said(&product(320, Mode::ReluFwd));
    assert!(note.contains("have 1 plans with kernels of their own and 0 that reused them"), "{note}");
    assert_eq!(reused(&product(320, Mode::ReluFwd), &target), Some(true));
    assert_eq!(reused(&product(512, Mode::ReluFwd), &target), Some(true));
    assert!(said(&product(256, Mode::ReluFwd)).ends_with("compiled for it"));
    assert!(said(&product(320, Mode::ReluFwd)).ends_with("compiled for a plan with other extents"));
    // A hit counts neither.
    assert_eq!(reused(&product(320, Mode::ReluFwd), &target), Some(true));
    // Another structure and another device have kernels of their own.
    assert_eq!(reused(&product(320, Mode::GeluFwd), &target), Some(false));
    assert_eq!(reused(&product(320, Mode::ReluFwd), &Target::Profile(&a100)), Some(false));
    assert_eq!(reused(&convolution(4, 32), &target), Some(false));
    assert_eq!(reused(&convolution(8, 48), &target), Some(true));
    let counts = |stats: KernelStats| (stats.structures, stats.compiled, stats.reused);
    assert_eq!(counts(plans.kernel_stats()), (4, 4, 3));
    plans.clear();
    assert_eq!(counts(plans.kernel_stats()), (0, 4, 3));
    assert_eq!(reused(&product(320, Mode::ReluFwd), &target), Some(false));

    // Without the policy, no plan shares kernels.
    let fixed = Plans::new(library, Policy::default(), Limits::default());
    assert_eq!(fixed.get(&product(256, Mode::ReluFwd), &target).unwrap().kernels_reused(), None);
    assert_eq!((counts(fixed.kernel_stats()), fixed.explain(&product(256, Mode::ReluFwd), &target).notes), ((0, 0, 0), Vec::new()));

    // A plan with shared kernels is loaded from a file on its own.
    let folder = tempfile::tempdir().unwrap();
    let with =
        |policy: Policy| Plans::new(library, policy, Limits::default()).with_folder(Folder::new(folder.path().join("plans"), 1 << 30));
    let dynamic = || with(Policy::default().with_dynamic_shapes(true));
    let first = dynamic();
    first.get(&product(256, Mode::ReluFwd), &target).unwrap();
    assert_eq!(first.get(&product(320, Mode::ReluFwd), &target).unwrap().kernels_reused(), Some(true));
    let second = dynamic();
    let loaded = second.get(&product(320, Mode::ReluFwd), &target).unwrap();
    assert!(loaded.report().candidates.is_empty() && loaded.kernels_reused().is_none());
    assert!(second.explain(&product(320, Mode::ReluFwd), &target).notes[0].ends_with("loaded from a file"));
    let built = with(Policy::default()).get(&product(320, Mode::ReluFwd), &target).unwrap();
    assert!(!built.report().candidates.is_empty());
}
