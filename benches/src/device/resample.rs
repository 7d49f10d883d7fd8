//! The weights of cuDNN's bilinear and nearest resampling, which no document has: programs of plain descriptors are executed on images in which each
//! channel has a one in another pixel, so that a result's channels are the weights of its sources.
#![allow(unsafe_code)]

use crate::setup::Result;
use cudnn_graph::ffi::codes::{Attribute, AttributeType, Kind, PaddingMode, ResampleMode as Mode};
use cudnn_graph::ir::op::{ResampleMode, Window};
use cudnn_graph::program::Values;
use cudnn_graph::{
    Buffer, DType, DeviceProfile, Driver, Graph, Library, OwnedBindings, Planner, Policy, Program, Search, Stream, Target, encode,
    launch_addressed,
};
use std::sync::Arc;

/// A numerator and a denominator.
type Fraction = [i64; 2];
const ZERO: Fraction = [0, 1];
const HALF: Fraction = [1, 2];
const ONE: Fraction = [1, 1];
const TWO: Fraction = [2, 1];

/// The window, the padding before and after the axis, and the stride, each for all axes.
type Geometry = [Fraction; 4];
const DOUBLING: Geometry = [TWO, HALF, ONE, HALF];
const IMAGES: usize = 2;
/// Elements after each result, which an execution must leave as they are.
const GUARD: usize = 64;

struct Problem {
    mode: Mode,
    padding: PaddingMode,
    dtype: DType,
    spatial: Vec<usize>,
    geometry: Geometry,
}

impl Problem {
    /// The spatial extents of the result.
    fn outputs(&self) -> Vec<usize> {
        let [above, below] = self.geometry[3].map(|n| n.cast_unsigned() as usize);
        self.spatial.iter().map(|n| n * below / above).collect()
    }

    /// Changes a program of pooling to one of this problem.
    fn program(&self, library: &Library) -> Result<Program> {
        let channels: usize = self.spatial.iter().product();
        let of = |spatial: &[usize]| [&[IMAGES, channels], spatial].concat().iter().map(|&n| n as i64).collect::<Vec<i64>>();
        let mut g = Graph::new();
        let x = g.input_channels_last("x", self.dtype, of(&self.spatial));
        let y = g.resample(ResampleMode::AverageIncludePadding, x, Window::new(vec![1; self.spatial.len()]));
        g.output(y, "y", self.dtype);
        let mut program = encode(&g.verify()?, library.version())?;
        let mut larger = Graph::new();
        let like = larger.input_channels_last("y", self.dtype, of(&self.outputs()));
        let like = larger.get(like).ok_or("there is no tensor")?;
        for descriptor in &mut program.descriptors {
            for s in &mut descriptor.settings {
                match s.attribute {
                    Attribute::RESAMPLE_MODE => s.values = Values::Code(self.mode.0, self.mode.to_string()),
                    Attribute::RESAMPLE_PADDING_MODE => s.values = Values::Code(self.padding.0, self.padding.to_string()),
                    Attribute::TENSOR_DIMENSIONS if descriptor.label == "y" => s.values = Values::I64(like.dims.0.clone()),
                    Attribute::TENSOR_STRIDES if descriptor.label == "y" => s.values = Values::I64(like.strides.0.clone()),
                    _ if descriptor.kind == Kind::RESAMPLE => {
                        let order = [
                            Attribute::RESAMPLE_WINDOW_DIMS,
                            Attribute::RESAMPLE_PRE_PADDINGS,
                            Attribute::RESAMPLE_POST_PADDINGS,
                            Attribute::RESAMPLE_STRIDES,
                        ];
                        if let Some(n) = order.iter().position(|&attribute| attribute == s.attribute) {
                            (s.ty, s.values) = (AttributeType::FRACTION, Values::Fractions(vec![self.geometry[n]; self.spatial.len()]));
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(program)
    }
}

fn problems() -> Vec<Problem> {
    let (bilinear, edge) = (Mode::BILINEAR, PaddingMode::EDGE_VAL_PAD);
    let doubling =
        |spatial: &[usize], padding| Problem { mode: bilinear, padding, dtype: DType::F32, spatial: spatial.to_vec(), geometry: DOUBLING };
    let mut all = Vec::new();
    for spatial in [&[3, 4][..], &[1, 1], &[2, 1]] {
        all.extend(PaddingMode::ALL.iter().map(|&padding| doubling(spatial, padding)));
    }
    all.extend([&[8, 5][..], &[33, 17], &[64, 3], &[2, 3, 2]].map(|spatial| doubling(spatial, edge)));
    all.push(doubling(&[33, 17], PaddingMode::ZERO_PAD));
    all.extend([DType::F16, DType::BF16].map(|dtype| Problem { dtype, ..doubling(&[3, 4], edge) }));
    let others = [
        DOUBLING,
        [ONE, ZERO, ZERO, HALF],
        [TWO, ZERO, ZERO, HALF],
        [TWO, HALF, HALF, HALF],
        [TWO, ZERO, ZERO, TWO],
        [ONE, ZERO, ZERO, ONE],
    ];
    for mode in [Mode::NEAREST, bilinear] {
        all.extend(others.iter().skip(usize::from(mode == bilinear)).map(|&geometry| Problem {
            mode,
            geometry,
            ..doubling(&[4, 6], edge)
        }));
    }
    all
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
    for p in problems() {
        println!(
            "\n{} {} of {} {:?} to {:?}, window, paddings and stride {:?}",
            p.mode,
            p.padding,
            p.dtype.name(),
            p.spatial,
            p.outputs(),
            p.geometry
        );
        let planned =
            Planner::for_program(library, p.program(library)?, &target, &Policy::default()).and_then(|planner| planner.first(&target));
        let plan = match planned {
            Ok(plan) => Arc::new(plan),
            Err(e) => {
                println!("refused: {}", e.to_string().replace('\n', "; "));
                continue;
            }
        };
        println!("engine {}", plan.engine().map_or_else(String::new, |engine| engine.tag()));
        let Some(stream) = stream.as_ref().filter(|_| p.dtype == DType::F32) else { continue };
        let ports = &plan.ports().device;
        let id = |name: &str| ports.iter().find(|port| port.name == name).map(|port| port.id).ok_or("there is no such tensor");
        let (x, y) = (id("x")?, id("y")?);
        let (sources, outputs) = (p.spatial.iter().product::<usize>(), p.outputs().iter().product::<usize>());
        let y_buffer = Arc::new(filled(stream, &vec![f32::NAN; IMAGES * sources * outputs + GUARD])?);
        let bindings = OwnedBindings::new().buffer(x, &Arc::new(filled(stream, &ones(sources))?)).buffer(y, &y_buffer);
        let workspace = Buffer::new(stream.device(), plan.workspace_bytes() as usize)?;
        // SAFETY: no tensor of the program holds addresses or lengths.
        unsafe { launch_addressed(&plan, stream, bindings, workspace)? }.wait()?;
        let mut got = vec![0.0f32; y_buffer.bytes() / 4];
        y_buffer.download(stream, 0, &mut got)?;
        let guard = got.split_off(got.len() - GUARD);
        println!("{} elements after the result were written", guard.iter().filter(|x| !x.is_nan()).count());
        print(&p.spatial, &p.outputs(), &got);
    }
    Ok(())
}

fn filled(stream: &Stream, data: &[f32]) -> Result<Buffer> {
    let mut buffer = Buffer::new(stream.device(), data.len() * 4)?;
    buffer.upload(stream, 0, data)?;
    Ok(buffer)
}

/// Images whose channel `n` has a one in pixel `n`; of the second image, a two.
fn ones(pixels: usize) -> Vec<f32> {
    let image = |factor: f32| (0..pixels * pixels).map(move |n| if n / pixels == n % pixels { factor } else { 0.0 });
    image(1.0).chain(image(2.0)).collect()
}

/// Divides a row-major position into one per axis.
fn split(mut n: usize, extents: &[usize]) -> Vec<usize> {
    let mut at: Vec<usize> = extents.iter().rev().map(|extent| (n % extent, n /= extent).0).collect();
    at.reverse();
    at
}

/// Prints the weights of an axis if those of the others have no part in them, and else the weights of some pixels.
fn print(spatial: &[usize], outputs: &[usize], got: &[f32]) {
    let (sources, results) = (spatial.iter().product::<usize>(), outputs.iter().product::<usize>());
    let (first, second) = got.split_at(sources * results);
    println!(
        "{} elements of the second image are not twice those of the first",
        first.iter().zip(second).filter(|(a, b)| !(2.0 * **a == **b)).count()
    );
    let list = |weights: &mut dyn Iterator<Item = (String, f32)>| {
        weights.filter(|(_, w)| *w != 0.0).map(|(at, w)| format!("{at}:{w}")).collect::<Vec<_>>().join(" ")
    };
    let middle: Vec<usize> = outputs.iter().map(|n| n / 2).collect();
    let mut axes = vec![Vec::new(); spatial.len()];
    for axis in 0..spatial.len() {
        for at in 0..outputs[axis] {
            let index = |n: usize, here: usize| if n == axis { at } else { here };
            let place = middle.iter().enumerate().zip(outputs).fold(0, |sum, ((n, &here), extent)| sum * extent + index(n, here));
            let mut weights = vec![0.0f32; spatial[axis]];
            (0..sources).for_each(|source| weights[split(source, spatial)[axis]] += first[place * sources + source]);
            println!("axis {axis}, {at}: {}", list(&mut weights.iter().enumerate().map(|(n, &w)| (n.to_string(), w))));
            axes[axis].push(weights);
        }
    }
    let mut unlike = 0;
    for (place, weights) in first.chunks(sources).enumerate() {
        let at = split(place, outputs);
        let product = |source: usize| split(source, spatial).iter().enumerate().map(|(axis, &n)| axes[axis][at[axis]][n]).product::<f32>();
        if weights.iter().enumerate().any(|(source, w)| !((w - product(source)).abs() < 1e-6)) {
            unlike += 1;
            if unlike <= 48 {
                println!(
                    "not their product: {at:?}: {}",
                    list(&mut weights.iter().enumerate().map(|(n, &w)| (format!("{:?}", split(n, spatial)), w)))
                );
            }
        }
    }
    println!("{unlike} of {results} pixels are no product of the weights of the axes");
}
