//! Products of the matrix units as inline PTX: as many operands as registers hold results, so the text is made.

use std::fmt::Write;

/// A product of 64 rows with `columns` columns over 16 terms, added to `columns / 2` registers of each thread.
///
/// `product_by_rows`: both operands in shared memory, `b` by its rows. `product_by_columns`: `a` in registers, `b` by its columns.
pub(crate) fn products(element: &str, columns_of_scores: u32, columns_of_values: u32) -> String {
    let mut text = String::new();
    product(&mut text, "product_by_rows", element, columns_of_scores, false);
    product(&mut text, "product_by_columns", element, columns_of_values, true);
    text
}

fn product(text: &mut String, name: &str, element: &str, columns: u32, weights: bool) {
    let results = columns / 2;
    let list = |from: u32, count: u32| (from..from + count).map(|n| format!("%{n}")).collect::<Vec<_>>().join(", ");
    let (a, b, add) = if weights { (4, results + 4, results + 5) } else { (1, results + 1, results + 2) };
    let a = if weights { format!("{{{}}}", list(results, a)) } else { list(results, a) };
    let arguments = if weights { "uint a0, uint a1, uint a2, uint a3" } else { "ulong64 a" };
    let inputs = if weights { "\"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3)" } else { "\"l\"(a)" };
    let transposed = if weights { ", 1" } else { ", 0, 0" };
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
