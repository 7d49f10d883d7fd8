//! Rules of the house that no compiler checks.

use conformance::golden::{self, repository};
use sdpa::cudnn::quirks::Quirk;
use sdpa::library::{MASKS, Named, SCORE_MODS};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Where unsafe code may be: the fence of each crate.
const FENCES: [&str; 32] = [
    "sdpa/driver/src/",
    "cudnn-graph/src/ffi/",
    "cudnn-graph/src/plan.rs",
    "cudnn-graph/src/plans/file.rs",
    "cudnn-graph/examples/fusions/times.rs",
    "sdpa/core/src/device.rs",
    "sdpa/cudnn/src/raw.rs",
    "sdpa/nvidia/src/host.rs",
    "sdpa/nvidia/src/empty.rs",
    "sdpa/nvidia/src/race/",
    "sdpa/cuda/src/plan/",
    "sdpa/cudnn/src/call.rs",
    "sdpa/cudnn/src/replay.rs",
    "sdpa/cudnn/src/files.rs",
    "sdpa/cudnn/src/portable.rs",
    "sdpa/nvidia/src/cudarc.rs",
    "sdpa/parallel/src/device/",
    "sdpa/candle/src/cuda.rs",
    "sdpa/candle/tests/cuda/graph.rs",
    "sdpa/python/src/call.rs",
    "sdpa/python/src/tensor.rs",
    "sdpa/tests/device.rs",
    "metal-fallback/src/apple/",
    "tests/emulated/src/",
    "tests/harness/emulated.rs",
    "tests/nccl/",
    "sdpa/cli/null-driver/",
    "tests/recording/src/",
    "tests/harness/code.rs",
    "tests/harness/recorder.rs",
    "tests/harness/allocations.rs",
    "benches/src/device/",
];

/// Lines of a file at most.
const LONGEST: usize = 600;

pub(crate) fn ignored() -> Vec<String> {
    let text = std::fs::read_to_string(repository(".gitignore")).unwrap();
    text.lines().map(|line| line.trim_matches('/').to_owned()).collect()
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && !ignored().contains(&name) {
                walk(&path, found);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// Every Rust file: its path from the root, and its text.
fn sources() -> Vec<(String, String)> {
    let root = std::fs::canonicalize(repository(".")).unwrap();
    let mut found = Vec::new();
    walk(&root, &mut found);
    assert!(found.len() > 50, "only {} files were found", found.len());
    found.sort();
    found
        .into_iter()
        .map(|path| (path.strip_prefix(&root).unwrap().display().to_string(), std::fs::read_to_string(&path).unwrap()))
        .collect()
}

/// Whether a line of code opens something unsafe: a block, a function, an implementation, a foreign item.
fn opens_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.split("unsafe ").skip(1).any(|rest| ["fn ", "impl", "extern", "{"].iter().any(|word| rest.trim_start().starts_with(word)))
}

#[test]
fn unsafe_code_stays_behind_its_fences() {
    let word = "unsafe";
    for opening in ["{ x() }", "fn f();", "impl Send for X {}", "extern \"C\" fn()"] {
        assert!(opens_unsafe(&format!("let x = {word} {opening}")));
    }
    assert!(!opens_unsafe(&format!("// {word} {{")) && !opens_unsafe(&format!("deny({word}_code)")));
    let mut outside = Vec::new();
    for (file, text) in sources() {
        if FENCES.iter().any(|fence| file.starts_with(fence)) {
            continue;
        }
        let lines = text.lines().enumerate().filter(|(_, line)| opens_unsafe(line));
        outside.extend(lines.map(|(n, line)| format!("{file}:{}: {}", n + 1, line.trim())));
    }
    assert!(outside.is_empty(), "{}", outside.join("\n"));
}

#[test]
fn every_fence_is_needed() {
    let sources = sources();
    for fence in FENCES {
        let needed = sources.iter().any(|(file, text)| file.starts_with(fence) && text.lines().any(opens_unsafe));
        assert!(needed, "there is no unsafe code in {fence}");
    }
}

/// Pieces of kernels that hold PTX: the emulation has others in their places. Products with many operands are generated, by `wgmma_wrappers.rs`.
const PTX: [&str; 5] = ["cluster.cuh", "mma.cuh", "ptx.cuh", "tma.cuh", "wgmma.cuh"];

#[test]
fn ptx_stays_in_its_pieces() {
    let folder = repository("sdpa/cuda/kernels");
    let with_ptx = |path: &PathBuf| std::fs::read_to_string(path).unwrap().contains("asm");
    let pieces: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let mut have: Vec<String> =
        pieces.iter().filter(|path| with_ptx(path)).map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    have.sort();
    assert_eq!(have, PTX);
    assert!(pieces.len() > 2 * PTX.len());
}

#[test]
fn no_file_is_too_long_to_read_in_one_sitting() {
    let long: Vec<String> = sources()
        .into_iter()
        .map(|(file, text)| (text.lines().count(), file))
        .filter(|(lines, _)| *lines > LONGEST)
        .map(|(lines, file)| format!("{file} has {lines} lines; {LONGEST} is the limit"))
        .collect();
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// What each crate of the libraries may depend on among the others: a leaf knows no other leaf.
const ARROWS: [(&str, &[&str]); 16] = [
    ("sdpa/driver", &[]),
    ("cudnn-graph", &["sdpa-cache", "sdpa-driver"]),
    ("sdpa/core", &[]),
    ("sdpa/cache", &[]),
    ("sdpa/oracle", &[]),
    ("sdpa/parallel", &["sdpa-core", "sdpa-driver", "sdpa-nvidia"]),
    ("sdpa/cpu", &["sdpa-core"]),
    ("sdpa/emit", &["sdpa-core"]),
    ("metal-fallback", &["sdpa-cache", "sdpa-core", "sdpa-emit"]),
    ("sdpa/nvidia", &["sdpa-cache", "sdpa-core", "sdpa-driver"]),
    ("sdpa/cudnn", &["cudnn-graph", "sdpa-cache", "sdpa-core", "sdpa-nvidia"]),
    ("sdpa/cuda", &["sdpa-cache", "sdpa-core", "sdpa-driver", "sdpa-emit", "sdpa-nvidia"]),
    ("sdpa", &["metal-fallback", "sdpa-cache", "sdpa-core", "sdpa-cpu", "sdpa-cuda", "sdpa-cudnn", "sdpa-nvidia", "sdpa-parallel"]),
    ("sdpa/conformance", &["sdpa", "sdpa-oracle"]),
    ("sdpa/candle", &["sdpa"]),
    ("sdpa/python", &["sdpa"]),
];

#[test]
fn crates_hold_the_arrows() {
    let manifest =
        |folder: &str| -> toml::Table { toml::from_str(&std::fs::read_to_string(repository(folder).join("Cargo.toml")).unwrap()).unwrap() };
    let names: Vec<String> = ARROWS.iter().map(|(folder, _)| manifest(folder)["package"]["name"].as_str().unwrap().to_owned()).collect();
    for (folder, allowed) in ARROWS {
        let mut have: Vec<String> = manifest(folder)["dependencies"].as_table().unwrap().keys().cloned().collect();
        have.retain(|name| names.contains(name));
        assert_eq!(have, allowed, "{folder}");
    }
    let members = manifest(".")["workspace"]["default-members"].as_array().unwrap().clone();
    for member in members.iter().filter_map(|m| m.as_str()).filter(|m| *m != "sdpa/cli") {
        assert!(ARROWS.iter().any(|(folder, _)| *folder == member), "{member} has no row");
    }
}

#[test]
fn every_crate_says_what_it_is() {
    for (folder, _) in ARROWS {
        let manifest: toml::Table = toml::from_str(&std::fs::read_to_string(repository(folder).join("Cargo.toml")).unwrap()).unwrap();
        let package = manifest["package"].as_table().unwrap();
        let published = !package.contains_key("publish");
        let of_registry: &[&str] = if published { &["keywords", "categories", "documentation"] } else { &[] };
        for field in ["description", "license", "rust-version", "readme"].iter().chain(of_registry) {
            assert!(package.contains_key(*field) || (folder == "sdpa/python" && *field == "readme"), "{folder} has no {field}");
        }
        assert!(repository(folder).join("README.md").exists(), "{folder} has no README.md");
    }
}

#[test]
fn the_oracle_shares_no_code_with_what_it_judges() {
    let manifest: toml::Table = toml::from_str(&std::fs::read_to_string(repository("sdpa/oracle/Cargo.toml")).unwrap()).unwrap();
    let dependencies: Vec<&String> = ["dependencies", "dev-dependencies", "build-dependencies"]
        .iter()
        .filter_map(|kind| manifest.get(*kind)?.as_table())
        .flat_map(toml::Table::keys)
        .collect();
    assert_eq!(dependencies, ["rayon"]);
    let text = std::fs::read_to_string(repository("sdpa/conformance/src/oracle.rs")).unwrap();
    let foreign = |line: &&str| line.contains("::") && line.contains("sdpa") && !line.contains("sdpa_oracle::");
    assert_eq!(text.lines().filter(foreign).collect::<Vec<_>>(), ["use sdpa::{Align, DType, Mask};"]);
}

#[test]
fn the_map_of_the_house_names_every_folder_and_crate() {
    let Ok(map) = std::fs::read_to_string(repository("docs/ARCHITECTURE.md")) else {
        conformance::say::skip("house", "there is no docs/ARCHITECTURE.md");
        return;
    };
    let manifest: toml::Table = toml::from_str(&std::fs::read_to_string(repository("Cargo.toml")).unwrap()).unwrap();
    let members = manifest["workspace"]["members"].as_array().unwrap();
    let mut names: Vec<String> =
        members.iter().filter_map(|m| m.as_str()).map(|m| m.strip_prefix("tests/").unwrap_or(m).to_owned()).collect();
    let skipped = ignored();
    for entry in std::fs::read_dir(repository(".")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() && !name.starts_with('.') && !skipped.contains(&name) {
            names.push(name);
        }
    }
    let missing: Vec<String> =
        names.into_iter().filter(|name| !map.contains(&format!("{name}/")) && !map.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/ARCHITECTURE.md does not mention {}", missing.join(", "));
}

/// The page of what engines get wrong is made from the table, and what each row says would find it is there.
#[test]
fn quirks_have_their_page_and_their_tests() {
    let page = std::fs::read_to_string(repository("docs/lowering.md")).unwrap();
    let (begins, ends) = ("<!-- made from sdpa/cudnn/src/quirks.rs -->\n", "<!-- end -->\n");
    let (before, rest) = page.split_once(begins).unwrap();
    let (_, after) = rest.split_once(ends).unwrap();
    let made = format!("{before}{begins}{}{ends}{after}", Quirk::table());
    golden::check("docs/lowering.md", &made).unwrap_or_else(|e| panic!("{e}"));
    let all = tests_and_cases();
    for quirk in Quirk::ALL {
        let test = quirk.row().test;
        let there = match test.strip_prefix("device ") {
            Some(part) => repository(&format!("benches/src/device/{part}.rs")).exists(),
            None => is_test_or_case(&all, test),
        };
        assert!(there, "{quirk:?}: there is no {test}");
    }
}

/// The text of all sources and cases.
fn tests_and_cases() -> String {
    let mut all: String = sources().into_iter().map(|(_, text)| text).collect();
    for file in std::fs::read_dir(repository("sdpa/conformance/cases")).unwrap() {
        all.push_str(&std::fs::read_to_string(file.unwrap().path()).unwrap());
    }
    all
}

fn is_test_or_case(all: &str, name: &str) -> bool {
    all.contains(&format!("fn {name}()")) || all.contains(&format!("name = \"{name}\""))
}

/// Every rule of the frontend says what holds what becomes of it, and names quirks that are there.
#[test]
fn rules_of_the_frontend_have_what_holds_them() {
    let (page, all) = (std::fs::read_to_string(repository("docs/rules.md")).unwrap(), tests_and_cases());
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| rule of")).collect();
    assert!(rows.len() > 60, "{} rules", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.trim_matches(['|', ' ']).split(" | ").collect();
        let [_, here, held] = cells[..] else { panic!("three cells: {row}") };
        let names: Vec<&str> = held.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty() || held.contains("support.md"), "nothing holds: {row}");
        assert!(names.iter().all(|name| is_test_or_case(&all, name)), "{row}");
        let quirk = |name: &&str| Quirk::ALL.iter().any(|quirk| format!("{quirk:?}") == **name);
        let unsupported = here.split("unsupported: `").skip(1).filter_map(|rest| rest.split('`').next());
        assert!(unsupported.clone().all(|name| quirk(&name)), "{row}");
    }
}

/// Every page: Markdown files outside of folders that are ignored.
fn pages(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && !ignored().contains(&name) {
            pages(&path, found);
        } else if name.ends_with(".md") {
            found.push(std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// Pages, scripts and workflows name test binaries that are there, and files that are there.
#[test]
fn tests_are_where_texts_say() {
    let mut texts = Vec::new();
    pages(&repository("."), &mut texts);
    for folder in ["scripts", ".ci", ".github/workflows"] {
        texts.extend(std::fs::read_dir(repository(folder)).unwrap().map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap()));
    }
    let path = |folder: &str| repository("tests").join(folder);
    // Those of other packages.
    let there = |name: &str| path(name).join("main.rs").exists() || name == "dispatch";
    let (mut asked, mut wrong) = (0, Vec::new());
    for text in &texts {
        let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c == '`').collect();
        let binaries = words.windows(2).filter(|pair| pair[0] == "--test" && pair[1].starts_with(char::is_alphabetic)).map(|pair| pair[1]);
        wrong.extend(binaries.inspect(|_| asked += 1).filter(|name| !there(name)).map(str::to_owned));
        let files = words.iter().filter(|word| word.starts_with("tests/") && word.ends_with(".rs"));
        wrong.extend(files.filter(|file| !repository(file).exists()).map(|file| (*file).to_owned()));
    }
    assert!(asked > 10 && wrong.is_empty(), "there is no {}", wrong.join(", "));
}

/// What a name with alternatives in braces stands for.
pub(crate) fn alternatives(name: &str) -> Vec<String> {
    let parts = name.split_once('{').and_then(|(before, rest)| rest.split_once('}').map(|(inside, after)| (before, inside, after)));
    match parts {
        None => vec![name.to_owned()],
        Some((before, inside, after)) => inside.split(',').flat_map(|one| alternatives(&format!("{before}{one}{after}"))).collect(),
    }
}

#[test]
fn every_result_is_named_by_a_page_and_every_name_is_a_result() {
    assert_eq!(alternatives("a-{b,c}-{d,e}"), ["a-b-d", "a-b-e", "a-c-d", "a-c-e"]);
    let mut texts = Vec::new();
    pages(&repository("."), &mut texts);
    let words = texts.iter().flat_map(|text| text.split('`')).map(|word| word.strip_prefix("benches/results/").unwrap_or(word));
    let faults = ["metal-faults.txt", "cuda-mutants.txt"];
    let results = |word: &&str| (word.ends_with(".txt") || word.ends_with(".jsonl")) && (word.starts_with("20") || faults.contains(word));
    let named: BTreeSet<String> = words.filter(results).flat_map(alternatives).collect();
    let files = std::fs::read_dir(repository("benches/results")).unwrap();
    let files: BTreeSet<String> = files.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(files.difference(&named).collect::<Vec<_>>(), [""; 0], "results that no page names");
    assert_eq!(named.difference(&files).collect::<Vec<_>>(), [""; 0], "results that are not there");
}

/// Rows of a table. Brackets are escaped: rustdoc reads `[batch]` as a link.
fn rows<T>(names: &[Named<T>]) -> String {
    let cell = |text: &str| text.replace('|', "\\|").replace('[', "\\[").replace(']', "\\]");
    names.iter().map(|named| format!("| `{}` | {} |\n", named.spelling, cell(named.about))).collect()
}

/// The page of the language has a row for everything in the library.
#[test]
fn the_library_has_its_page() {
    let page = std::fs::read_to_string(repository("docs/expressions.md")).unwrap();
    let (score_mods, masks) = ("| score_mod | modified score |\n|---|---|\n", "| mask | keys that query q attends to |\n|---|---|\n");
    let (before, rest) = page.split_once(score_mods).unwrap();
    let (_, after) = rest.split_once("\nOn the command line and in problems").unwrap();
    let (score_mods, masks) = (format!("{score_mods}{}", rows(SCORE_MODS)), format!("{masks}{}", rows(MASKS)));
    let made = format!("{before}{score_mods}\n{masks}\nOn the command line and in problems{after}");
    golden::check("docs/expressions.md", &made).unwrap_or_else(|e| panic!("{e}"));
}

/// Inline links of a page and the labels that it defines, outside of blocks of code.
fn links(page: &str) -> (Vec<&str>, Vec<&str>) {
    let (mut inline, mut defined, mut code) = (Vec::new(), Vec::new(), false);
    for line in page.lines() {
        code ^= line.trim_start().starts_with("```");
        if code {
            continue;
        }
        match line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")) {
            Some((label, _)) => defined.push(label),
            None => inline.extend(line.split("](").skip(1).filter_map(|rest| rest.split(')').next())),
        }
    }
    (inline, defined)
}

/// Labels that a page uses in links such as `[text][label]`, outside of code.
fn used_labels(page: &str) -> BTreeSet<&str> {
    let (mut labels, mut code) = (BTreeSet::new(), false);
    for line in page.lines() {
        code ^= line.trim_start().starts_with("```");
        // Every second part is between backticks.
        let prose = line.split('`').step_by(2).filter(|_| !code);
        labels.extend(prose.flat_map(|part| part.split("][").skip(1)).filter_map(|rest| rest.split_once(']')).map(|(label, _)| label));
    }
    labels
}

#[test]
fn a_page_defines_the_labels_that_it_uses() {
    assert_eq!(used_labels("[a][b] `c[0][1]` [d][e]\n```\nf[0][2]\n```\n"), BTreeSet::from(["b", "e"]));
    let mut texts = Vec::new();
    pages(&repository("."), &mut texts);
    let missing = |page: &String| {
        let defined = links(page).1;
        let title = page.lines().next().unwrap_or_default();
        let labels = used_labels(page).into_iter().filter(|label| !defined.contains(label));
        labels.map(|label| format!("{title}: [{label}]")).collect::<Vec<_>>()
    };
    assert_eq!(texts.iter().flat_map(missing).collect::<Vec<_>>(), [""; 0]);
    // A page of a crate links to a page of docs. A file with the path of that page would be shown as a path.
    assert_eq!(texts.iter().filter(|page| page.lines().count() < 2).collect::<Vec<_>>(), [""; 0]);
}

/// READMEs of crates and guides are read on crates.io and docs.rs, where the path of a file leads nowhere. Guides define links to one another, which
/// `sdpa/docs/links.md` defines anew for docs.rs.
#[test]
fn published_pages_do_not_link_to_files() {
    assert_eq!(links("[a](b.md) [c][d]\n```\n[e](f)\n```\n\n[d]: g.md\n"), (vec!["b.md"], vec!["d"]));
    let outside = |link: &&str| link.starts_with("https://") || link.starts_with('#');
    let known = std::fs::read_to_string(repository("sdpa/docs/links.md")).unwrap();
    let known: BTreeSet<&str> = links(&known).1.into_iter().collect();
    let guides = std::fs::read_dir(repository("sdpa/docs")).unwrap().map(|entry| entry.unwrap().path());
    let guides: Vec<PathBuf> = guides.filter(|path| !path.ends_with("links.md")).collect();
    let module = std::fs::read_to_string(repository("sdpa/src/guide.rs")).unwrap();
    let mut wrong = Vec::new();
    for path in &guides {
        let name = path.file_name().unwrap().to_string_lossy();
        let page = std::fs::read_to_string(path).unwrap();
        if std::fs::read_to_string(repository("docs").join(&*name)).ok().as_ref() != Some(&page) {
            wrong.push(format!("sdpa/docs/{name} is not the page of docs: link to it"));
        }
        let (inline, defined) = links(&page);
        wrong
            .extend(inline.iter().filter(|link| !outside(link)).map(|link| format!("{name}: ({link}) is a file: define a reference link")));
        wrong.extend(
            defined.iter().filter(|label| !known.contains(**label)).map(|label| format!("{name}: links.md does not define [{label}]")),
        );
        if !module.contains(&format!("\"{name}\"")) {
            wrong.push(format!("{name}: sdpa/src/guide.rs does not show it"));
        }
    }
    let crates = [
        "cudnn-graph",
        "metal-fallback",
        "sdpa",
        "sdpa/cache",
        "sdpa/candle",
        "sdpa/cli",
        "sdpa/conformance",
        "sdpa/core",
        "sdpa/cpu",
        "sdpa/cuda",
    ];
    for folder in
        crates.into_iter().chain(["sdpa/cudnn", "sdpa/driver", "sdpa/emit", "sdpa/nvidia", "sdpa/oracle", "sdpa/parallel", "sdpa/python"])
    {
        let page = std::fs::read_to_string(repository(folder).join("README.md")).unwrap();
        wrong.extend(links(&page).0.iter().filter(|link| !outside(link)).map(|link| format!("{folder}/README.md: ({link}) is a file")));
        for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
            let same = std::fs::read(repository(folder).join(licence)).ok() == std::fs::read(repository(licence)).ok();
            wrong.extend((!same).then(|| format!("{folder} lacks {licence}")));
        }
    }
    assert!(guides.len() > 5 && wrong.is_empty(), "{}", wrong.join("\n"));
}
