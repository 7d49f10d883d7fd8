//! Products of the matrix units as inline PTX: as many operands as registers hold results, so the text is made.

use crate::tile::PANEL;
use std::fmt::Write;

/// Where the operands of a product are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Both in shared memory, each by its rows.
    ByRows,
    /// `a` in registers, `b` in shared memory by its rows.
    HeldByRows,
    /// `a` in registers, `b` in shared memory by its columns.
    HeldByColumns,
    /// Both in shared memory, each by its columns.
    ByColumns,
}

impl Operands {
    fn name(self) -> &'static str {
        match self {
            Operands::ByRows | Operands::HeldByRows => "wgmma_k_major",
            Operands::HeldByColumns => "wgmma_b_mn_major",
            Operands::ByColumns => "wgmma_mn_major",
        }
    }

    /// Which operands in shared memory are transposed.
    fn transposed(self) -> &'static str {
        match self {
            Operands::ByRows => ", 0, 0",
            Operands::HeldByRows => ", 0",
            Operands::HeldByColumns => ", 1",
            Operands::ByColumns => ", 1, 1",
        }
    }
}

/// Products of the forward kernel: 64 rows with so many columns over 16 terms, added to half as many registers of each thread.
pub(crate) fn forward(element: &str, columns_of_scores: u32, columns_of_values: u32) -> String {
    let mut text = String::new();
    product(&mut text, element, columns_of_scores, Operands::ByRows);
    product(&mut text, element, columns_of_scores, Operands::HeldByRows);
    product(&mut text, element, columns_of_values, Operands::HeldByColumns);
    text
}

/// Products of the backward kernel: scores of 64 keys and 64 queries, gradients of keys and values of so many columns, gradients of queries, a panel of
/// columns at once.
pub(crate) fn backward(element: &str, columns: [u32; 2]) -> String {
    let mut text = String::new();
    product(&mut text, element, 64, Operands::ByRows);
    product(&mut text, element, 64, Operands::HeldByRows);
    let [first, second] = columns;
    product(&mut text, element, first, Operands::HeldByColumns);
    if first != second {
        product(&mut text, element, second, Operands::HeldByColumns);
    }
    product(&mut text, element, PANEL, Operands::ByColumns);
    text
}

fn product(text: &mut String, element: &str, columns: u32, operands: Operands) {
    let results = columns / 2;
    let held = matches!(operands, Operands::HeldByRows | Operands::HeldByColumns);
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
