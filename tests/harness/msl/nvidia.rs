//! Plans as kernels of NVIDIA GPUs: the same MSL, with another library before it and a kernel of CUDA's that calls it.

use metal_fallback::Plan;
use sdpa_driver::Nvrtc;
use std::fmt::Write;

/// The function that is launched.
pub const ENTRY: &str = "run";

const LIBRARY: &str = include_str!("../../metal/nvidia/metal_stdlib");

/// Everything is a device function; attributes are MSL's.
const OPTIONS: [&str; 3] = ["--device-as-default-execution-space", "--std=c++17", "--diag-suppress=1097,1866,1835,177"];

/// Where a plan's threadgroup memory begins, and how long it is in all.
pub fn threadgroup(plan: &Plan) -> (Vec<usize>, usize) {
    let mut end = 0;
    let places = plan.threadgroup.iter().map(|(_, bytes)| {
        let place = end;
        end += bytes.next_multiple_of(16);
        place
    });
    (places.collect(), end)
}

/// The text for the compiler.
pub fn source(plan: &Plan) -> String {
    let own = plan.source.replace("[[threadgroup(", "[[threadgroup_memory(");
    let own: String = own.lines().filter(|line| !line.starts_with("#include ")).map(|line| format!("{line}\n")).collect();
    let mut text = format!("{LIBRARY}\n{own}\n");
    // Where members begin, clang asserts: not every NVRTC can.
    let (structure, size, _) = plan.params(1.0, None).layout();
    let _ = writeln!(text, "static_assert(sizeof({structure}) == {size}, \"\");");
    let mut parameters = Vec::new();
    let mut arguments = Vec::new();
    for (n, binding) in plan.buffers.iter().enumerate() {
        match binding.ty.strip_suffix('&') {
            Some(ty) => {
                parameters.push(format!("{ty}* b{n}"));
                arguments.push(format!("*b{n}"));
            }
            None => {
                parameters.push(format!("{} b{n}", binding.ty));
                arguments.push(format!("b{n}"));
            }
        }
    }
    let (places, _) = threadgroup(plan);
    arguments.extend(plan.threadgroup.iter().zip(places).map(|((element, _), at)| format!("reinterpret_cast<{element}*>(room + {at})")));
    arguments.push("uint3{blockIdx.x, blockIdx.y, blockIdx.z}".to_owned());
    arguments.extend(["threadIdx.x", "threadIdx.x / 32", "threadIdx.x % 32"].map(str::to_owned));
    let _ = write!(
        text,
        "extern \"C\" __global__ void __launch_bounds__({}) {ENTRY}({}) {{\n    extern __shared__ __align__(16) unsigned char room[];\n    {}(\n        {});\n}}\n",
        plan.threads,
        parameters.join(", "),
        plan.entry,
        arguments.join(",\n        ")
    );
    text
}

/// Machine code of a plan, with lines of its source.
///
/// # Errors
/// What the compiler says.
pub fn compile(nvrtc: &Nvrtc, plan: &Plan, architecture: &str) -> Result<Vec<u8>, String> {
    let options: Vec<&str> = OPTIONS.into_iter().chain(["--generate-line-info"]).collect();
    let made = nvrtc.compile(&source(plan), architecture, &options);
    made.map(|made| made.code).map_err(|e| format!("{}: {e}", plan.entry))
}
