//! A paged cache, from outside.

use super::tensors::{file_of, from_bytes, numbers, to_bytes};
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

#[test]
fn random_pages_are_right_in_every_layout() {
    for options in [
        "--paged 16",
        "--shape 3,4,2,5,100,16 --paged 1 --mask padding --stats",
        "--shape 3,4,2,5,100,16,24 --paged 7 --layout bhsd --dtype f32 --score-mod alibi --mask causal-bottom-right",
        "--shape 3,8,2,1,1000,64 --paged 16 --pages 9 --mask padding --dtype f16",
        "--shape 2,4,1,3,100,16 --paged 200 --layout sbhd --bias --pages 11",
        "--shape 4,4,2,7,100,16 --paged 16 --cu-seqlens-q 0,1,8,8,13 --mask causal-ends --stats",
        "--shape 3,4,2,9,100,16,24 --paged 7 --cu-seqlens-q 2,11,12,20 --layout bhsd --dtype f32 --score-mod alibi --mask window:9,0:ends --sink",
    ] {
        let out = sdpa(words(&format!("run {options} --check --json --executor cpu")));
        assert_eq!(code(&out), 0, "{options}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        let told = json(&out);
        assert_eq!(told["check"]["passed"], true, "{told}");
        assert!(told["params"].to_string().contains("page_table"), "{told}");
    }
}

const BATCH: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const QUERIES: usize = 3;
const PAGE: usize = 4;
const PAGES: usize = 7;
const DIM: usize = 16;
const TABLE: [[i64; 3]; BATCH] = [[5, 0, 6], [2, 5, -1]];
const KEYS: [i32; BATCH] = [11, 7];

/// Safetensors of these, f32, and integers.
fn write(path: &str, floats: &[(&str, &[usize], &[f64])], integers: &[(&str, &[usize], Vec<i32>)], table: Option<&[i64]>) {
    let of = |values: &[f64]| values.iter().flat_map(|x| to_bytes(*x, Dtype::F32)).collect::<Vec<u8>>();
    let mut all: Vec<(&str, Dtype, &[usize], Vec<u8>)> =
        floats.iter().map(|(name, shape, values)| (*name, Dtype::F32, *shape, of(values))).collect();
    all.extend(
        integers
            .iter()
            .map(|(name, shape, values)| (*name, Dtype::I32, *shape, values.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())),
    );
    if let Some(table) = table {
        all.push(("page_table", Dtype::I64, &[BATCH, 3], table.iter().flat_map(|n| n.to_le_bytes()).collect()));
    }
    std::fs::write(path, file_of(&all)).unwrap();
}

fn o_of(path: &str) -> Vec<f64> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("o").unwrap();
    assert_eq!(tensor.shape(), [BATCH, QUERIES, HEADS, DIM]);
    from_bytes(tensor.data(), Dtype::F32)
}

/// Keys entry by entry, 0 where there is none.
fn gathered(container: &[f64]) -> Vec<f64> {
    let mut all = Vec::new();
    for (row, keys) in TABLE.iter().zip(KEYS) {
        for key in 0..3 * PAGE {
            let at = (row[key / PAGE].max(0) as usize * PAGE + key % PAGE) * KV_HEADS * DIM;
            let there = (key as i32) < keys;
            all.extend((0..KV_HEADS * DIM).map(|n| if there { container[at + n] } else { 0.0 }));
        }
    }
    all
}

#[test]
fn pages_of_a_file_are_the_keys_that_the_table_says() {
    let folder = Folder::new();
    let (q_len, kv_len) = (BATCH * QUERIES * HEADS * DIM, PAGES * PAGE * KV_HEADS * DIM);
    let q = numbers(q_len, Dtype::F32, 1).0;
    let [k, v] = [2, 3].map(|seed| numbers(kv_len, Dtype::F32, seed).0);
    let lengths = || [("seq_len_q", &[BATCH][..], vec![QUERIES as i32; BATCH]), ("seq_len_kv", &[BATCH], KEYS.to_vec())];
    let (container, table) = ([PAGES, PAGE, KV_HEADS, DIM], TABLE.as_flattened());
    let of_q = [BATCH, QUERIES, HEADS, DIM];
    let (whole, apart, bare) = (folder.path("pages"), folder.path("apart"), folder.path("bare"));
    for (path, table) in [(&whole, Some(table)), (&bare, None)] {
        write(path, &[("q", &of_q, &q), ("k", &container, &k), ("v", &container, &v)], &lengths(), table);
    }
    let entries = [BATCH, 3 * PAGE, KV_HEADS, DIM];
    write(&apart, &[("q", &of_q, &q), ("k", &entries, &gathered(&k)), ("v", &entries, &gathered(&v))], &lengths(), None);
    let text = folder.path("table.txt");
    std::fs::write(&text, "5 0 6\n\n2, 5\n").unwrap();
    let run = |rest: &str| {
        let to = folder.path("out");
        let line = format!("run {rest} --layout bshd --mask padding --mask causal-bottom-right --output {to} --check --executor cpu");
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 0, "{rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        o_of(&to)
    };
    let want = run(&format!("--input {apart}"));
    assert!(want.iter().any(|x| *x != 0.0));
    for rest in [format!("--input {whole} --paged 4"), format!("--input {bare} --paged 4 --page-table {text}")] {
        let got = run(&rest);
        assert!(got.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-5), "{rest}");
    }
    let wrong = |options: &str| {
        let out = sdpa(words(&format!("run {options} --executor cpu --output {}", folder.path("none"))));
        assert_eq!(code(&out), 2, "{options}: {}", stdout(&out));
        assert!(!folder.names().iter().any(|name| name == "none"));
        errors(&out).join("\n")
    };
    // Without lengths, the page of keys that are there is missed; and pages are as long as they are.
    let told = wrong(&format!("--input {whole} --paged 4"));
    assert!(told.contains("page_table[1][2]: got -1, expected between 0 and 6"), "{told}");
    let told = wrong(&format!("--input {whole} --paged 5 --pages 7 --dtype f31"));
    for rule in [
        "k: got pages of 4 tokens, expected 5, the value of --paged",
        "v: got pages of 4 tokens",
        "--pages: cannot be combined with --input, which contains the pages",
        "--dtype",
    ] {
        assert!(told.contains(rule), "{told}");
    }
    let told = wrong(&format!("--input {bare} --paged 4"));
    assert!(told.contains("has no tensor page_table, which is declared"), "{told}");
    let odd = folder.path("odd");
    for (shape, table, rule) in [
        (&[][..], &[0][..], "page_table: got shape [], expected [batch, pages of a batch entry]"),
        (&[BATCH, 0], &[], "page_table: got shape [2, 0]"),
        (&[0, usize::MAX], &[], "page_table: got shape [0, 9223372036854775807]"),
        (&[3, 1], &[0, 1, 2], "page_table: got shape [3, 1], expected [2, 1] (batch, ceil(k / 4))"),
    ] {
        let tables = [("page_table", shape, table.to_vec())];
        write(&odd, &[("q", &of_q, &q), ("k", &container, &k), ("v", &container, &v)], &tables, None);
        let told = wrong(&format!("--input {odd} --paged 4"));
        assert!(told.contains(rule), "{told}");
    }
}

#[test]
fn every_mistake_in_pages_is_told_with_the_others() {
    let folder = Folder::new();
    let text = folder.path("table.txt");
    let to = folder.path("out");
    for (table, options, told) in [
        ("", "--paged 0 --scale nan", &["--paged: got 0, expected between 1", "--scale"][..]),
        ("", "--paged x --pages 0 --mask nothing", &["--paged: got \"x\", expected an integer", "--mask"]),
        ("", "--paged 16 --pages 99999999999", &["--pages: got 99999999999, expected between"]),
        (
            "",
            "--paged 9223372036854775807 --pages 9223372036854775807",
            &["--paged: got 9223372036854775807", "--pages: got 9223372036854775807"],
        ),
        ("", "--paged 2147483647 --pages 2147483647", &["k.strides", "v.strides"]),
        ("", "--pages 3 --page-table T", &["--pages: requires --paged", "--page-table: requires --paged"]),
        ("", "--paged 16 --cu-seqlens 0,5,7", &["--cu-seqlens: cannot be combined with --paged; use --cu-seqlens-q"]),
        ("", "--paged 16 --cu-seqlens-kv 0,5,7 --pages x", &["--cu-seqlens-kv: cannot be combined with --paged", "--pages"]),
        (
            "",
            "--paged 16 --cu-seqlens-q 0,8,7 --mask padding",
            &["at most 7, the longest sequence of the problem (this is sequence 0)", "got per-sequence lengths, expected none with packed"],
        ),
        (
            "0 1 x",
            "--paged 40 --page-table T --cu-seqlens-q 0,5,4",
            &["got \"x\", expected page indices", "at least 5, the offset before it"],
        ),
        ("", "--paged 16 --page-table T", &["got no line, expected page indices"]),
        ("", "--paged 16 --page-table /nowhere/table.txt", &["--page-table /nowhere/table.txt: cannot be read"]),
        ("0 1 x\n2 99999999999", "--paged 40 --page-table T", &["\"x\", \"99999999999\", expected page indices"]),
        ("0 1 2 3\n0 1 2", "--paged 40 --page-table T", &["line 1: got 4 pages, expected at most 3 for 100 keys"]),
        ("0 1 2", "--paged 40 --page-table T --dtype f31", &["got 1 lines with pages, expected 2, one for each batch entry", "--dtype"]),
        ("0 1 6\n-1 2 3", "--paged 40 --page-table T", &["page_table[0][2]: got 6, expected between 0 and 5", "page_table[1][0]: got -1"]),
        ("0 1 2\n3 4", "--paged 40 --page-table T", &["page_table[1][2]: got -1, expected between 0 and 5"]),
        (
            "0 1 2\n3 4 5",
            "--paged 40 --page-table T --backward",
            &["--backward: paged: got a paged KV cache, expected none in a backward pass"],
        ),
    ] {
        std::fs::write(&text, table).unwrap();
        let options = options.replace('T', &text);
        let out = sdpa(words(&format!("run --shape 2,4,2,7,100,16 {options} --executor cpu --output {to}")));
        let errors = errors(&out);
        assert_eq!(code(&out), 2, "{options}: {errors:?}");
        for told in told {
            assert!(errors.iter().any(|line| line.contains(told)), "{options}: {told} in {errors:?}");
        }
        assert_eq!(folder.names(), ["table.txt"], "{options}");
    }
}

/// A mask that folds to false leaves nothing of the lengths in it, and no page is read.
#[test]
fn a_table_is_not_judged_where_no_key_is_kept() {
    let folder = Folder::new();
    let text = folder.path("table.txt");
    std::fs::write(&text, "-1 -1 -1\n-1 9 -1\n").unwrap();
    for mask in ["--mask padding --mask 1>2", "--mask padding&q<q", "--mask 1>2"] {
        let line =
            format!("run --shape 2,2,2,5,40,16 --paged 16 --pages 6 --page-table {text} {mask} --stats --check --json --executor cpu");
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 0, "{mask}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    }
}

#[test]
fn a_paged_problem_is_inspected_and_read_from_toml() {
    let out = sdpa(words("inspect --stage problem --shape 3,4,2,7,9,16 --paged 4 --pages 20"));
    assert_eq!(code(&out), 0);
    assert!(stdout(&out).contains("20 pages of 4 tokens, by page_table"), "{}", stdout(&out));
    let folder = Folder::new();
    let (problems, plans) = (folder.path("p.toml"), folder.path("plans"));
    for (pages, want, rule) in [
        ("paged = 16\npages = 40", 3, "cudnn"),
        ("paged = 0", 2, "cache: --paged: got 0, expected between 1"),
        ("pages = 40", 2, "cache: --pages: requires --paged"),
        ("paged = 16\nbackward = true", 2, "gradients of a paged KV cache are not supported"),
        ("paged = \"16\"", 2, "invalid type"),
    ] {
        std::fs::write(&problems, format!("[[problem]]\nname = \"cache\"\nshape = [3, 4, 2, 1, 90, 64]\n{pages}\n")).unwrap();
        let out = sdpa(words(&format!("compile --problems {problems} --device h200 --cudnn /nowhere/libcudnn.so.9 --out {plans}")));
        let told = errors(&out).join("\n");
        assert_eq!((code(&out), told.contains(rule)), (want, true), "{pages}: {told}");
    }
}
