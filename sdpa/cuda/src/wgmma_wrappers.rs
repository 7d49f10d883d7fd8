//! Generates the `wgmma.mma_async` wrappers, whose number of register operands depends on the shape.

use crate::tile_config::PANEL;
use std::fmt::Write;

/// The location of A and B, and the contiguous axis of each.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Both in shared memory, K-major.
    SharedK,
    /// A in registers, B in shared memory, K-major.
    RegistersK,
    /// A in registers, B in shared memory, MN-major.
    RegistersMn,
    /// Both in shared memory, MN-major.
    SharedMn,
}

impl Operands {
    fn name(self) -> &'static str {
        match self {
            Operands::SharedK | Operands::RegistersK => "wgmma_k_major",
            Operands::RegistersMn => "wgmma_b_mn_major",
            Operands::SharedMn => "wgmma_mn_major",
        }
    }

    /// Returns the transpose immediates of the operands in shared memory.
    fn transposed(self) -> &'static str {
        match self {
            Operands::SharedK => ", 0, 0",
            Operands::RegistersK => ", 0",
            Operands::RegistersMn => ", 1",
            Operands::SharedMn => ", 1, 1",
        }
    }
}

/// Generates the CUDA wrappers of the WGMMAs of the forward kernel: m64nNk16, where N is the number of keys (S = Q Kᵀ) or of columns of V
/// (O = P V).
pub(crate) fn forward(element: &str, columns_of_scores: u32, columns_of_values: u32) -> String {
    let mut text = String::new();
    product(&mut text, element, columns_of_scores, Operands::SharedK);
    product(&mut text, element, columns_of_scores, Operands::RegistersK);
    product(&mut text, element, columns_of_values, Operands::RegistersMn);
    text
}

/// Generates the CUDA wrappers of the WGMMAs of the backward kernels: S and dP of 64 keys by 64 queries, dK and dV of `columns`, and dQ
/// of one panel of columns.
pub(crate) fn backward(element: &str, columns: [u32; 2]) -> String {
    let mut text = String::new();
    product(&mut text, element, 64, Operands::SharedK);
    product(&mut text, element, 64, Operands::RegistersK);
    let [first, second] = columns;
    product(&mut text, element, first, Operands::RegistersMn);
    if first != second {
        product(&mut text, element, second, Operands::RegistersMn);
    }
    product(&mut text, element, PANEL, Operands::SharedMn);
    text
}

fn product(text: &mut String, element: &str, columns: u32, operands: Operands) {
    let results = columns / 2;
    let held = matches!(operands, Operands::RegistersK | Operands::RegistersMn);
    let list = |from: u32, count: u32| (from..from + count).map(|n| format!("%{n}")).collect::<Vec<_>>().join(", ");
    let (a, b, add) = if held { (4, results + 4, results + 5) } else { (1, results + 1, results + 2) };
    let a = if held { format!("{{{}}}", list(results, a)) } else { list(results, a) };
    let arguments = if held { "uint a0, uint a1, uint a2, uint a3" } else { "ulong64 a" };
    let inputs = if held { "\"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3)" } else { "\"l\"(a)" };
    let (name, transposed) = (operands.name(), operands.transposed());
    let outputs: Vec<String> = (0..results).map(|n| format!("\"+f\"(d[{n}])")).collect();
    let _ = writeln!(
        text,
        "inline void {name}(float (&d)[{results}], {arguments}, ulong64 b, bool add) {{\n    asm volatile(\n        \
         \"{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{add}, 0;\\n\"\n        \
         \"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{}}}, {a}, %{b}, add, 1, 1{transposed};\\n}}\"\n        \
         : {}\n        : {inputs}, \"l\"(b), \"r\"(int(add)));\n}}\n",
        list(0, results),
        outputs.join(", "),
    );
}
