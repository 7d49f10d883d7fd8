//! The weights of cuDNN's bilinear upsampling, which no document has: images in which each channel has a one in another pixel, so that the channels of a
//! result are the weights of its sources.
#![allow(unsafe_code)]

use crate::setup::Result;
use cudnn_graph::ffi::codes::{Attribute, PaddingMode};
use cudnn_graph::program::Values;
use cudnn_graph::{
    Buffer, DType, DeviceProfile, Driver, Graph, Library, OwnedBindings, Planner, Policy, Program, Search, Stream, Target, encode,
    launch_addressed,
};
use std::sync::Arc;

const IMAGES: usize = 2;
/// Elements after each result, which an execution must leave as they are.
const GUARD: usize = 64;

/// The upsampling of images with a channel for each pixel.
fn program(library: &Library, [h, w]: [usize; 2], padding: PaddingMode) -> Result<Program> {
    let mut g = Graph::new();
    let x = g.input_channels_last("x", DType::F32, [IMAGES, h * w, h, w].map(|n| n as i64));
    let y = g.upsample(x);
    g.output(y, "y", DType::F32);
    let mut program = encode(&g.verify()?, library.version())?;
    let settings = program.descriptors.iter_mut().flat_map(|descriptor| &mut descriptor.settings);
    for setting in settings.filter(|setting| setting.attribute == Attribute::RESAMPLE_PADDING_MODE) {
        setting.values = Values::Code(padding.0, padding.to_string());
    }
    Ok(program)
}

/// Prints the weights of every problem. With the name of a profile, such as `h200`, problems are only planned for it, without a GPU.
pub(crate) fn run(profile: Option<&str>) -> Result<()> {
    let library = Library::load(&Search::default())?;
    let profile = profile.map(DeviceProfile::named).transpose()?;
    let stream = match &profile {
        Some(_) => None,
        None => Some(Arc::new(Driver::load(None)?.device(0)?.stream()?)),
    };
    let handle = stream.as_ref().map(|stream| library.handle(stream)).transpose()?;
    let target = match (&handle, &profile) {
        (Some(handle), _) => Target::Handle(handle),
        (None, Some(profile)) => Target::Profile(profile),
        (None, None) => return Err("there is no device".into()),
    };
    println!("cuDNN {} from {}", library.version(), library.path().display());
    for spatial in [[3, 4], [1, 1], [2, 1], [8, 5], [33, 17], [64, 3]] {
        for &padding in PaddingMode::ALL {
            let planner = Planner::for_program(library, program(library, spatial, padding)?, &target, &Policy::default())?;
            let plan = Arc::new(planner.first(&target)?);
            println!("\n{spatial:?}, {padding}, engine {}", plan.engine().map_or_else(String::new, |engine| engine.tag()));
            let Some(stream) = &stream else { continue };
            let id =
                |name: &str| plan.ports().device.iter().find(|port| port.name == name).map(|port| port.id).ok_or("there is no such tensor");
            let pixels = spatial[0] * spatial[1];
            let one = |factor: f32| (0..pixels * pixels).map(move |n| if n / pixels == n % pixels { factor } else { 0.0 });
            let x = filled(stream, &one(1.0).chain(one(2.0)).collect::<Vec<f32>>())?;
            let y = Arc::new(filled(stream, &vec![f32::NAN; IMAGES * 4 * pixels * pixels + GUARD])?);
            let bindings = OwnedBindings::new().buffer(id("x")?, &Arc::new(x)).buffer(id("y")?, &y);
            let workspace = Buffer::new(stream.device(), plan.workspace_bytes() as usize)?;
            // SAFETY: no tensor of the program holds addresses or lengths.
            unsafe { launch_addressed(&plan, stream, bindings, workspace)? }.wait()?;
            let mut got = vec![0.0f32; y.bytes() / 4];
            y.download(stream, 0, &mut got)?;
            let guard = got.split_off(got.len() - GUARD);
            println!("{} elements after the result were written", guard.iter().filter(|x| !x.is_nan()).count());
            print(spatial, &got);
        }
    }
    Ok(())
}

fn filled(stream: &Stream, data: &[f32]) -> Result<Buffer> {
    let mut buffer = Buffer::new(stream.device(), data.len() * 4)?;
    buffer.upload(stream, 0, data)?;
    Ok(buffer)
}

/// Prints the weights along each axis, and the results whose weights are no product of these.
fn print(spatial: [usize; 2], got: &[f32]) {
    let (pixels, width) = (spatial[0] * spatial[1], 2 * spatial[1]);
    let (first, second) = got.split_at(4 * pixels * pixels);
    let alike = first.iter().zip(second).filter(|(a, b)| 2.0 * **a == **b).count();
    println!("{} elements of the second image are not twice those of the first", first.len() - alike);
    // The sum over the sources along the other axis, in its middle.
    let weights = |axis: usize, at: usize| {
        let place = if axis == 0 { at * width + spatial[1] } else { spatial[0] * width + at };
        let mut sums = vec![0.0f32; spatial[axis]];
        for source in 0..pixels {
            sums[[source / spatial[1], source % spatial[1]][axis]] += first[place * pixels + source];
        }
        sums
    };
    let axes = [0, 1].map(|axis| (0..2 * spatial[axis]).map(|at| weights(axis, at)).collect::<Vec<_>>());
    let list = |weights: &[f32]| {
        let some = weights.iter().enumerate().filter(|(_, w)| **w != 0.0);
        some.map(|(at, w)| format!("{at}:{w}")).collect::<Vec<_>>().join(" ")
    };
    for (axis, all) in axes.iter().enumerate() {
        println!("axis {axis}: {}", all.iter().map(|weights| list(weights)).collect::<Vec<_>>().join(" | "));
    }
    let product = |place: usize, source: usize| axes[0][place / width][source / spatial[1]] * axes[1][place % width][source % spatial[1]];
    let places = first.chunks(pixels).enumerate();
    let is_product =
        |place: usize, weights: &[f32]| weights.iter().enumerate().all(|(source, w)| (w - product(place, source)).abs() < 1e-6);
    let unlike: Vec<_> = places.filter(|(place, weights)| !is_product(*place, weights)).collect();
    println!("{} of {} results are no product of the weights of the axes", unlike.len(), 4 * pixels);
    for (place, weights) in unlike.iter().take(48) {
        println!("  {}, {}: {}", place / width, place % width, list(weights));
    }
}
