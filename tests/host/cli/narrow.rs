//! 8-bit floats, from outside.

use super::tensors::{file, file_of, from_bytes};
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

fn scalar(file: &SafeTensors, name: &str) -> f64 {
    let one = file.tensor(name).unwrap_or_else(|_| panic!("no {name} in {:?}", file.names()));
    assert_eq!((one.dtype(), one.shape().iter().product::<usize>()), (Dtype::F32, 1), "{name}");
    from_bytes(one.data(), Dtype::F32)[0]
}

#[test]
fn random_inputs_are_scaled_rounded_and_checked_in_both_passes() {
    for rest in [
        "--dtype f8e4m3 --mask causal",
        "--dtype f8e5m2 --layout bshd --score-mod softcap:20",
        "--dtype f8e4m3 --o-dtype bf16 --d-o-dtype f8e5m2 --gradient-dtype f16",
    ] {
        let out = sdpa(words(&format!("run --shape 2,4,2,21,30,16,24 {rest} --backward --check --json --executor cpu")));
        assert_eq!(code(&out), 0, "{rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        let told = json(&out);
        assert_eq!(told["check"]["passed"], true, "{told}");
        assert_eq!(told["check"]["gradients"].as_array().map(Vec::len), Some(3), "{told}");
    }
}

#[test]
fn results_are_written_with_their_scales_and_greatest_numbers() {
    let folder = Folder::new();
    let [path, to] = ["in.safetensors", "out.safetensors"].map(|name| folder.path(name));
    let shape: &[usize] = &[2, 4, 19, 16];
    std::fs::write(&path, file(["q", "k", "v", "do"].map(|name| (name, Dtype::F32, shape)).as_slice())).unwrap();
    let out = sdpa(words(&format!(
        "run --input {path} --dtype f8e4m3 --backward --d-o-dtype f8e5m2 --gradient-dtype f8e5m2 --check --output {to} --executor cpu"
    )));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let bytes = std::fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("o").unwrap().dtype(), Dtype::F8_E4M3);
    for name in ["dq", "dk", "dv"] {
        assert_eq!(file.tensor(name).unwrap().dtype(), Dtype::F8_E5M2, "{name}");
    }
    let (scale, amax) = (scalar(&file, "scale_o"), scalar(&file, "amax_o"));
    assert!(scale * amax <= 448.0 && scale * amax > 112.0, "scale {scale} of results up to {amax} leaves E4M3 unused or is too much");
    assert!((scalar(&file, "descale_o") * scale - 1.0).abs() < 1e-6);
}

#[test]
fn numbers_of_8_bits_are_taken_as_they_are_and_for_no_other_type() {
    let folder = Folder::new();
    let [path, to] = ["in.safetensors", "out.safetensors"].map(|name| folder.path(name));
    // One query and one key: the weight is one, and the result is the value 3 times its scale.
    let shape: &[usize] = &[1, 1, 1, 1];
    let (one, three) = (vec![0x38], vec![0x44]);
    let numbers = [("q", one.clone()), ("k", one), ("v", three)];
    let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = numbers.map(|(name, bytes)| (name, Dtype::F8_E4M3, shape, bytes)).into();
    std::fs::write(&path, file_of(&tensors)).unwrap();
    let out = sdpa(words(&format!("run --input {path} --dtype bf16 --executor cpu")));
    assert_eq!(code(&out), 2, "{}", stdout(&out));
    assert!(errors(&out)[0].contains("F8_E4M3"), "{:?}", errors(&out));

    tensors.push(("descale_v", Dtype::F32, &[1], 0.5f32.to_le_bytes().to_vec()));
    std::fs::write(&path, file_of(&tensors)).unwrap();
    let out = sdpa(words(&format!("run --input {path} --dtype f8e4m3 --o-dtype f16 --check --output {to} --executor cpu")));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let bytes = std::fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(from_bytes(file.tensor("o").unwrap().data(), Dtype::F16), [1.5]);
    assert_eq!(scalar(&file, "amax_o"), 1.5);
}

#[test]
fn a_scale_that_is_not_finite_and_above_zero_is_a_mistake_that_names_it() {
    let folder = Folder::new();
    let path = folder.path("in.safetensors");
    let shape: &[usize] = &[1, 1, 2, 16];
    let numbers = ["q", "k", "v", "do"].map(|name| (name, Dtype::F8_E4M3, shape, vec![0x38; 32]));
    let forward = ["descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"];
    let backward = ["descale_d_o", "descale_dp", "scale_dp", "scale_dq", "scale_dk", "scale_dv"];
    for (scale, pass) in forward.map(|scale| (scale, "")).into_iter().chain(backward.map(|scale| (scale, "--backward"))) {
        for value in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
            let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = numbers.clone().into();
            tensors.push((scale, Dtype::F32, &[1], value.to_le_bytes().to_vec()));
            std::fs::write(&path, file_of(&tensors)).unwrap();
            let out = sdpa(words(&format!("run --input {path} --dtype f8e4m3 {pass} --check --executor cpu")));
            let told = format!("{scale} {value}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
            assert_eq!(code(&out), 2, "{told}");
            let is_named = |error: &String| error.contains(&format!("--input: {scale}: got {value}, expected a finite number above 0"));
            assert!(errors(&out).iter().any(is_named), "{told}");
        }
    }
}

#[test]
fn blocks_have_scales_of_their_own() {
    for rest in
        ["--dtype f8e4m3 --o-dtype bf16 --mask causal", "--dtype f8e5m2 --layout bshd --score-mod softcap:20 --bias", "--dtype f8e4m3"]
    {
        let out = sdpa(words(&format!("run --shape 2,4,2,140,170,64,40 {rest} --block-scaled --check --json --executor cpu")));
        assert_eq!(code(&out), 0, "{rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        assert_eq!(json(&out)["check"]["passed"], true, "{rest}");
    }
    for (rest, rule) in [
        ("--dtype bf16", "f8e4m3 or f8e5m2"),
        ("--dtype f8e4m3 --backward", "along those"),
        ("--dtype f8e4m3 --shape 1,2,2,9,9,40,32", "a multiple of 32"),
    ] {
        let shape = if rest.contains("--shape") { "" } else { "--shape 1,2,2,9,9,64,32" };
        let out = sdpa(words(&format!("run {shape} {rest} --block-scaled --executor cpu")));
        assert_eq!(code(&out), 2, "{rest}: {}", stdout(&out));
        assert!(errors(&out).iter().any(|e| e.contains(rule)), "{rest}: {:?}", errors(&out));
    }
    let unsupported = sdpa(words("run --shape 1,2,2,9,9,64,32 --dtype f8e4m3 --block-scaled --executor metal"));
    assert_ne!(code(&unsupported), 0, "{}", stdout(&unsupported));
}

#[test]
fn scales_of_blocks_are_read_where_they_lie() {
    let folder = Folder::new();
    let [path, to] = ["in.safetensors", "out.safetensors"].map(|name| folder.path(name));
    // One query and one key: the weight is one, and the result is the value times the scale of its line, 4, 2 and 1.
    let (rows, shape): (Vec<u8>, &[usize]) = (vec![0x38; 32], &[1, 1, 1, 32]);
    let mut scales = vec![0u8; 512];
    // Of line 1 row 1, of line 3 row 3: four lines of 32 share a row, each with four blocks.
    (scales[0], scales[16], scales[3 * 16]) = (129, 128, 127);
    let ones = vec![127u8; 512];
    let of_blocks: &[usize] = &[1, 1, 128, 4];
    let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = ["q", "k", "v"].map(|name| (name, Dtype::F8_E4M3, shape, rows.clone())).into();
    tensors.extend(["block_scale_q", "block_scale_k"].map(|name| (name, Dtype::F8_E8M0, of_blocks, ones.clone())));
    tensors.push(("block_scale_v", Dtype::F8_E8M0, of_blocks, scales));
    std::fs::write(&path, file_of(&tensors)).unwrap();
    let out = sdpa(words(&format!("run --input {path} --dtype f8e4m3 --block-scaled --o-dtype f16 --check --output {to} --executor cpu")));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let bytes = std::fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let o = from_bytes(file.tensor("o").unwrap().data(), Dtype::F16);
    assert_eq!([o[0], o[1], o[3]], [4.0, 2.0, 1.0], "{o:?}");
    assert_eq!(scalar(&file, "amax_o"), 4.0);

    let wrong = tensors.iter().position(|(name, ..)| *name == "block_scale_k").unwrap();
    tensors[wrong].2 = &[1, 1, 4, 128];
    std::fs::write(&path, file_of(&tensors)).unwrap();
    let out = sdpa(words(&format!("run --input {path} --dtype f8e4m3 --block-scaled --executor cpu")));
    assert_eq!(code(&out), 2, "{}", stdout(&out));
    assert!(errors(&out).iter().any(|e| e.contains("block_scale_k: got shape")), "{:?}", errors(&out));
}
