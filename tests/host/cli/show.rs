//! Pictures, from outside.

use super::tool::{Folder, code, errors, json, sdpa, stdout, words};

/// Elements of a file that is well-formed: names in the order in which they begin.
pub(crate) fn elements(svg: &str) -> Vec<String> {
    let (mut open, mut all) = (Vec::new(), Vec::new());
    for part in svg.split('<').skip(1) {
        let (tag, text) = part.split_once('>').unwrap();
        assert!(!text.contains('>'), "{part}");
        let ampersands = text.matches('&').count();
        assert_eq!(ampersands, ["&amp;", "&lt;", "&gt;", "&quot;"].iter().map(|e| text.matches(e).count()).sum::<usize>(), "{text}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.split([' ', '/']).next().unwrap().to_owned();
        if !tag.ends_with('/') {
            open.push(name.clone());
        }
        all.push(name);
    }
    assert!(open.is_empty(), "{open:?}");
    all
}

fn count(svg: &str, class: &str) -> usize {
    svg.matches(&format!("class=\"{class}\"")).count()
}

#[test]
fn a_picture_has_a_cell_for_each_pair_that_is_kept() {
    let folder = Folder::new();
    let to = folder.path("a.svg");
    for (options, cells, runs) in [
        ("--shape 1,2,2,16,12,8 --score-mod alibi", 16 * 12, 16),
        ("--shape 1,2,2,16,16,8 --score-mod alibi --mask causal", 136, 16),
        ("--shape 1,2,2,16,16,8 --mask causal --mask dilated:4", 40, 40),
        ("--shape 1,2,2,300,500,8 --score-mod softcap:3", 128 * 128, 128),
        ("--shape 1,2,2,4,4,8 --mask prefix-lm:0 --mask window:1,0:bottom-right --mask k!=q", 0, 0),
    ] {
        let out = sdpa(words(&format!("show {options} --output {to}")));
        assert_eq!(code(&out), 0, "{options}: {}", String::from_utf8_lossy(&out.stderr));
        assert!(stdout(&out).starts_with(&format!("output      {to}\n")), "{}", stdout(&out));
        let svg = std::fs::read_to_string(&to).unwrap();
        let names = elements(&svg);
        assert_eq!((names[0].as_str(), count(&svg, "cell"), count(&svg, "kept")), ("svg", cells, runs), "{options}");
        assert!(names.iter().filter(|n| *n == "text").count() > 20 && svg.contains("modified score") && svg.contains("derivative"));
    }
}

#[test]
fn numbers_of_a_picture_are_told() {
    let folder = Folder::new();
    let to = folder.path("a.svg");
    let line = format!(
        "show --shape 1,2,2,8,8,8 --score-mod alibi-slopes --score-mod softcap:30 --mask causal --head 1 --param cap=10 --score 1.5 --output {to} --json"
    );
    let told = json(&sdpa(words(&line)));
    // The slope of the second of two heads is 2^-8.
    let range = |name: &str| [&told[name]["min"], &told[name]["max"]].map(|x| x.as_f64().unwrap());
    let cap = |x: f64| 10.0 * (x / 10.0).tanh();
    let near = |got: [f64; 2], want: [f64; 2]| got.iter().zip(want).all(|(x, y)| (x - y).abs() < 1e-6);
    assert!(near(range("modified_score"), [cap(1.5 - 7.0 / 256.0), cap(1.5)]), "{told}");
    assert!(
        near(range("curve_value"), [cap(-60.0), cap(60.0)]) && near(range("curve_derivative"), [1.0 - (6.0f64).tanh().powi(2), 1.0]),
        "{told}"
    );
    assert_eq!((&told["cells"], &told["kept"], &told["head"]), (&serde_json::json!([8, 8]), &0.5625.into(), &1.into()));
}

#[test]
fn a_terminal_and_a_png_show_the_same() {
    let folder = Folder::new();
    let to = folder.path("a.png");
    let out = sdpa(words(&format!("show --shape 1,2,2,64,64,8 --score-mod alibi --mask causal --output {to}")));
    assert_eq!(code(&out), 0);
    let lines: Vec<&str> = stdout(&out).lines().filter(|l| l.trim().starts_with('|')).collect();
    assert_eq!(lines.len(), 20, "{}", stdout(&out));
    assert!(lines.iter().all(|l| l.trim().len() == 42) && lines[0].contains("@  ") && lines[19].contains('.'), "{lines:#?}");
    let png = std::fs::read(&to).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(b"IEND\xaeB`\x82"));
    assert_eq!(folder.names(), ["a.png"]);
}

#[test]
fn mistakes_of_a_picture_are_told_at_once() {
    let folder = Folder::new();
    let to = folder.path("a.gif");
    let out = sdpa(words(&format!("show --shape 1,2,2,8,8,8 --head 2 --batch x --score nan --score-mod sofcap --output {to}")));
    assert_eq!(code(&out), 2);
    let told = errors(&out);
    for what in
        ["got \"x\", expected an integer of at least 0", "got nan, expected a finite", "one of softcap:CAP", "must end in .svg or .png"]
    {
        assert!(told.iter().any(|line| line.contains(what)), "{what} in {told:#?}");
    }
    let out = sdpa(words("show --shape 1,2,2,8,8,8 --head 2 --batch 1"));
    assert_eq!(errors(&out).len(), 2, "{:?}", errors(&out));
    assert!(errors(&out)[0].contains("got 2, expected less than 2, the number of query heads"));
    assert!(folder.names().is_empty());
}
