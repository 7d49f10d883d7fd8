//! Passes the declared parameters of score_mods and masks to kernels.

use sdpa_emit::{Captured, Dialect};
use std::fmt::Write;

/// Returns the MSL structure with the declared parameters of score_mods and masks, and the macros by which a kernel receives and passes
/// it.
pub(crate) fn declaration(captured: &Captured, scalars_slot: u32, tensors_slot: u32) -> String {
    let (mut members, mut passed) = (String::new(), Vec::new());
    let mut argument = |name: String, space: &str, element: &str, slot: u32| {
        let _ = writeln!(members, "    {space} {element}* {name};");
        let text = format!("{space} {element}* {name} [[buffer({slot})]], ");
        passed.push(name);
        text
    };
    let mut scalars = String::new();
    if !captured.scalars().is_empty() {
        scalars = argument("scalars".to_owned(), "constant", "float", scalars_slot);
    }
    let tensors = captured.tensors().into_iter().enumerate();
    let tensors: String = tensors
        .map(|(n, (_, dtype, _))| argument(format!("tensor_{n}"), "const device", Dialect::Msl.element(dtype), tensors_slot + n as u32))
        .collect();
    format!(
        "struct Captured {{\n{members}}};\n#define CAPTURED_SCALARS {scalars}\n#define CAPTURED_TENSORS {tensors}\n\
         #define CAPTURED Captured{{{}}}\n",
        passed.join(", ")
    )
}
