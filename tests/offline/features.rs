//! `docs/features.md`: which executor supports which feature, by pass and device. The answers are those of `cargo sdpa support`.

#[path = "../host/cli/tool.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod tool;

use conformance::golden;
use conformance::offline::Runtime;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use tool::{code, json, sdpa_with, words};

const SHAPE: &str = "2,8,2,512,512,64";

/// The passes of a row.
#[derive(Clone, Copy, PartialEq)]
enum Passes {
    Both,
    /// The feature has no backward pass, or no gradient.
    Forward,
    /// The feature is a gradient.
    Backward,
}

use Passes::{Backward, Both, Forward};

/// A feature, the options that request it with a shape of their own or none, and its passes.
type Feature = (&'static str, &'static str, &'static str, Passes);

const FEATURES: [Feature; 43] = [
    ("f16, bf16", "--dtype f16", "", Both),
    ("f32", "--dtype f32", "", Both),
    ("FP8 (e4m3)", "--dtype f8e4m3", "2,8,8,512,512,128", Both),
    ("FP8 (e4m3) in, bf16 out", "--dtype f8e4m3 --o-dtype bf16", "2,8,8,512,512,128", Forward),
    ("MXFP8", "--dtype f8e4m3 --block-scaled --o-dtype bf16", "2,8,8,512,512,128", Forward),
    ("head dim 128", "", "2,8,2,512,512,128", Both),
    ("head dims 192 and 128", "", "2,8,2,512,512,192,128", Both),
    ("head dim 256", "", "2,8,2,512,512,256", Both),
    ("head dim 320", "", "2,8,2,512,512,320", Both),
    ("head dim 60", "", "2,8,2,512,512,60", Both),
    ("one query (decode)", "", "2,8,2,1,512,64", Forward),
    ("lengths per sequence", "--mask padding", "", Both),
    ("causal", "--mask causal", "", Both),
    ("causal, bottom-right aligned", "--mask causal-bottom-right", "2,8,2,128,512,64", Both),
    ("sliding window", "--mask window:128,0", "", Both),
    ("prefix-LM", "--mask prefix-lm:64", "", Both),
    ("causal, aligned to the ends of sequences", "--mask padding --mask causal-ends", "", Both),
    ("documents", "--mask causal --mask document", "", Both),
    ("neighbourhood (NATTEN)", "--mask natten:33", "", Both),
    ("traced mask over indices", "--mask dilated:3", "", Both),
    ("mask tensor over queries and keys", "--mask array:qk", "", Both),
    ("softcap", "--score-mod softcap:30", "", Both),
    ("ALiBi", "--score-mod alibi", "", Both),
    ("table at computed indices", "--score-mod relative-bias:8,512", "", Both),
    ("score_mod with causal and documents", "--score-mod softcap:30 --mask causal --mask document", "", Both),
    ("bias", "--score-mod bias:hqk", "", Both),
    ("gradient of a bias", "--score-mod bias16:hqk --wrt bias", "", Backward),
    ("gradient of a scalar", "--score-mod softcap:30 --wrt cap", "", Backward),
    ("gradient of a table", "--score-mod relative-bias:8,512 --wrt rel", "", Backward),
    ("packed sequences", "--cu-seqlens 0,300,712", "", Both),
    ("packed sequences, separate offsets for keys", "--cu-seqlens-q 0,300,712 --cu-seqlens-kv 0,100,612", "", Both),
    ("packed sequences with a softcap, causal", "--cu-seqlens 0,300,712 --score-mod softcap:30 --mask causal", "", Both),
    ("paged KV cache, decode", "--paged 16 --mask padding", "32,8,2,1,4096,64", Forward),
    ("paged KV cache, packed queries", "--paged 16 --cu-seqlens-q 0,300,712 --mask causal-ends", "", Forward),
    ("attention sink", "--sink", "", Both),
    ("dropout", "--dropout 0.1", "", Both),
    ("dropout with a softcap, causal", "--dropout 0.1 --score-mod softcap:30 --mask causal", "", Both),
    ("base-2 stats", "--stats-base-2", "", Forward),
    ("row_max, sum_exp", "--row-max --sum-exp", "", Forward),
    ("deterministic", "--deterministic", "", Backward),
    ("deterministic with a softcap, causal", "--deterministic --score-mod softcap:30 --mask causal", "", Backward),
    ("batch_invariant", "--batch-invariant", "", Both),
    ("sink, window and softcap", "--sink --mask window:128,0 --score-mod softcap:30", "", Both),
];

const DEVICES: [&str; 4] = ["a100", "l40s", "h200", "b200"];

const HEAD: &str = "# Support matrix

This page lists for each feature which executor supports it, by pass and device. Use it to find out whether your model can run; for one problem, with reasons and alternatives,
run [`cargo sdpa support`](cli.md#support).

```console
$ cargo sdpa support --shape 4,32,8,4096,4096,128 --mask causal --score-mod softcap:30 --backward
```

A feature that an executor does not support is refused with the reason, and the automatic selection uses another executor. The CPU supports every feature.

| executor | devices | has run on |
|---|---|---|
| `cpu` | every CPU | x86-64: AVX-512, AVX2 and the portable code |
| `cuda`, `mma.sync` kernels | compute capability 8.0 and newer | H100 and H200; **never run on** A100, L40S and B200 |
| `cuda`, WGMMA kernels | compute capability 9.0 | H100 and H200 |
| `cudnn` | compute capability 8.0 and newer | H100 and H200; **never run on** A100, L40S and B200, where only plans were made |
| `metal` | Apple M1, A14 and newer | CPU emulation of the kernels only; **never run on** Apple hardware |

Cells: **both** passes, **fwd** or **bwd** only, or – for none. If a feature has one pass only, the cell names that pass. `cuda` uses the WGMMA kernels on the H200 and the `mma.sync` kernels
elsewhere, also on the H200 for f32. cuDNN is version 9.27: its engines were asked for a plan without a GPU. Other versions and every combination: [support.md](support.md).

Problems have batch 2, 8 query heads, 2 KV heads, 512 queries and keys and head dim 64 in bf16, unless the row says otherwise.

";

/// Returns which of the executors support a problem: cpu, cuda on each device, cudnn on each device, metal.
fn supported(options: &str, cudnn: &str) -> Vec<bool> {
    let line = format!("support --json {options} --cudnn {cudnn}");
    let out = sdpa_with(words(&line), []);
    assert_eq!(code(&out), 0, "{line}: {}", String::from_utf8_lossy(&out.stderr));
    let all = json(&out);
    let on = |list: &Value, device: &str, field: &str| {
        let found =
            list.as_array().unwrap().iter().find(|one| one["device"] == device).unwrap_or_else(|| panic!("{line}: {device} in {all}"));
        !found[field].is_null()
    };
    let mut cells = vec![all["cpu"]["supported"] == true];
    cells.extend(DEVICES.iter().map(|device| on(&all["cuda"], device, "tile")));
    cells.extend(DEVICES.iter().map(|device| on(&all["devices"], device, "form")));
    cells.push(all["metal"]["supported"] == true);
    cells
}

fn page(cudnn: &str) -> String {
    let mut text = format!("{HEAD}| feature | cpu |");
    for executor in ["cuda", "cudnn"] {
        DEVICES.iter().for_each(|device| text.push_str(&format!(" {executor} {} |", device.to_uppercase())));
    }
    text.push_str(" metal |\n|---|");
    text.push_str(&"---|".repeat(2 + 2 * DEVICES.len()));
    text.push('\n');
    for (feature, options, shape, passes) in FEATURES {
        let shape = if shape.is_empty() { SHAPE } else { shape };
        let of = |backward: &str| supported(&format!("--shape {shape} {options} {backward}"), cudnn);
        let forward = if passes == Backward { Vec::new() } else { of("") };
        let backward = if passes == Forward { Vec::new() } else { of("--backward") };
        let _ = write!(text, "| {feature} |");
        for n in 0..forward.len().max(backward.len()) {
            let has = |pass: &[bool]| pass.get(n).copied().unwrap_or(false);
            let cell = match (has(&forward), has(&backward)) {
                (true, true) => "both",
                (true, false) => "fwd",
                (false, true) => "bwd",
                (false, false) => "–",
            };
            let _ = write!(text, " {cell} |");
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_support_matrix_is_what_executors_answer() {
    let runtime = Runtime::find("9.27", Path::new(env!("CARGO_BIN_EXE_offline"))).unwrap();
    let page = page(&runtime.library.display().to_string());
    let row = |feature: &str| page.lines().find(|line| line.starts_with(&format!("| {feature} |"))).unwrap().to_owned();
    assert!(row("f32").contains(" both | both | both | both | both | – | – | – | – | both |"), "{}", row("f32"));
    golden::check("docs/features.md", &page).unwrap();
}
