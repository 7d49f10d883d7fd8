//! Shapes without a batch entry, a query or a key.

use super::tensors::from_bytes;
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

const SHAPES: [&str; 4] = ["0,4,2,5,7,16,8", "2,4,2,0,7,16,8", "2,4,2,5,0,16,8", "0,4,2,0,0,16,8"];

/// (batch, seq_q, seq_kv).
fn extents(shape: &str) -> [usize; 3] {
    let numbers: Vec<usize> = shape.split(',').map(|n| n.parse().unwrap()).collect();
    [numbers[0], numbers[3], numbers[4]]
}

/// The shape of a tensor in a file, and its numbers.
fn tensor(bytes: &[u8], name: &str) -> (Vec<usize>, Vec<f64>) {
    let all = SafeTensors::deserialize(bytes).unwrap();
    let tensor = all.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
    (tensor.shape().to_vec(), from_bytes(tensor.data(), Dtype::F32))
}

#[test]
fn both_passes_are_computed_checked_and_written() {
    let folder = Folder::new();
    let (to, again) = (folder.path("out.safetensors"), folder.path("again.safetensors"));
    for shape in SHAPES {
        let [batch, seq_q, seq_kv] = extents(shape);
        let options = "--dtype f32 --score-mod bias:qk --wrt bias --mask causal-bottom-right --row-max --sum-exp --backward";
        let out = sdpa(words(&format!("run --shape {shape} {options} --check --json --output {to}")));
        assert_eq!(code(&out), 0, "{shape}: {}{:?}", stdout(&out), out.stderr);
        let told = json(&out);
        assert_eq!((&told["executor"], &told["check"]["passed"]), (&"cpu".into(), &true.into()), "{shape}");
        let bytes = std::fs::read(&to).unwrap();
        let zeros = [
            ("o", vec![batch, 4, seq_q, 8]),
            ("sum_exp", vec![batch, 4, seq_q]),
            ("dq", vec![batch, 4, seq_q, 16]),
            ("dk", vec![batch, 2, seq_kv, 16]),
            ("dv", vec![batch, 2, seq_kv, 8]),
            ("dbias", vec![seq_q, seq_kv]),
        ];
        for (name, want) in zeros {
            let elements = want.iter().product();
            assert_eq!(tensor(&bytes, name), (want, vec![0.0; elements]), "{name} of {shape}");
        }
        for name in ["stats", "row_max"] {
            let want = vec![batch, 4, seq_q];
            let elements = want.iter().product();
            assert_eq!(tensor(&bytes, name), (want, vec![f64::NEG_INFINITY; elements]), "{name} of {shape}");
        }
        // Results have the axes of the layout.
        let out = sdpa(words(&format!("run --shape {shape} --dtype f32 --layout bshd --sink --executor cpu --check --output {again}")));
        assert_eq!(code(&out), 0, "{shape}: {}{:?}", stdout(&out), out.stderr);
        assert_eq!(tensor(&std::fs::read(&again).unwrap(), "o").0, [batch, seq_q, 4, 8], "{shape}");
    }
}

#[test]
fn operands_in_files_may_have_no_elements() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in.safetensors"), folder.path("out.npz"));
    for [batch, seq_q, seq_kv] in SHAPES.map(extents) {
        let dims = |rows: usize, dim: usize| [batch, 2, rows, dim];
        let all = [("q", dims(seq_q, 4)), ("k", dims(seq_kv, 4)), ("v", dims(seq_kv, 3)), ("do", dims(seq_q, 3))];
        let bytes: Vec<Vec<u8>> = all.iter().map(|(_, dims)| vec![0x3f; 4 * dims.iter().product::<usize>()]).collect();
        let views = all
            .iter()
            .zip(&bytes)
            .map(|((name, dims), bytes)| (*name, safetensors::tensor::TensorView::new(Dtype::F32, dims.to_vec(), bytes).unwrap()));
        std::fs::write(&from, safetensors::tensor::serialize(views, None).unwrap()).unwrap();
        let out = sdpa(words(&format!("run --input {from} --backward --check --output {to}")));
        assert_eq!(code(&out), 0, "{batch} {seq_q} {seq_kv}: {}{}", stdout(&out), errors(&out).join("\n"));
    }
}

#[test]
fn what_needs_a_kernel_or_a_score_says_so() {
    for shape in SHAPES {
        let [batch, seq_q, seq_kv] = extents(shape);
        let said = format!("(batch, seq_q, seq_kv): got ({batch}, {seq_q}, {seq_kv})");
        for stage in ["graph", "program", "schedule", "schedule --executor cuda", "kernel"] {
            let out = sdpa(words(&format!("inspect --stage {stage} --shape {shape}")));
            assert!(errors(&out).join("\n").contains(&said), "{stage}: {}", errors(&out).join("\n"));
            let out = sdpa(words(&format!("inspect --stage {stage} --backward --mask dilated:2 --shape {shape}")));
            assert!(errors(&out).join("\n").contains(&said), "{stage}: {}", errors(&out).join("\n"));
        }
        for stage in ["spec", "problem", "trace", "gradient"] {
            let out = sdpa(words(&format!("inspect --stage {stage} --score-mod alibi --shape {shape}")));
            assert_eq!(code(&out), 0, "{stage}: {}", errors(&out).join("\n"));
        }
        let out = sdpa(words(&format!("show --mask causal --shape {shape}")));
        assert!(errors(&out).join("\n").contains("a picture needs at least one of each"), "{}", errors(&out).join("\n"));
    }
    let out = sdpa(words("run --shape 1,0,1,2,2,0"));
    assert!(
        errors(&out).join("\n").contains("HQ: got 0, expected between 1 and")
            && errors(&out).join("\n").contains("D: got 0, expected between 1 and"),
        "{}",
        errors(&out).join("\n")
    );
}
