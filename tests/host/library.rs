//! The library of score_mods and masks, the cases that the suites have for it, and the closures that stand for it in the oracle.

use conformance::case::Case;
use conformance::library::Library;
use conformance::random::Random;
use sdpa::library::{MASKS, SCORE_MODS};

/// What the table in `sdpa::library` lists; axes in every number.
#[test]
fn every_name_has_a_case() {
    let cases = Case::all_library().unwrap();
    let has = |mods: bool, name: &str| {
        let of = |case: &Case| if mods { case.score_mod.clone() } else { case.mask.clone() };
        cases.iter().flat_map(of).any(|text| text == name || text.split_once(':').is_some_and(|(n, _)| n == name))
    };
    for named in SCORE_MODS {
        assert!(has(true, named.name()), "{}", named.spelling);
    }
    for named in MASKS {
        assert!(has(false, named.name()), "{}", named.spelling);
    }
    for text in cases.iter().flat_map(|c| &c.score_mod) {
        assert_eq!(text.parse::<sdpa::ScoreMod>().unwrap().to_string(), *text, "it is a name of the library");
    }
    for case in &cases {
        case.backward_spec().unwrap().validate().unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let problem = case.spec().unwrap().validate().unwrap();
        let library = case.library().unwrap();
        let drawn = library.as_ref().map_or_else(Vec::new, Library::params);
        problem.bind(&drawn).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    }
    let draws: Vec<Library> = cases.iter().filter_map(|c| c.library().unwrap()).collect();
    let lengths: Vec<f64> = draws.iter().filter_map(Library::key_lengths).flatten().copied().collect();
    assert!(lengths.contains(&0.0) && lengths.iter().any(|n| *n > 1.0), "{lengths:?}");
    let caps = draws.iter().filter(|d| d.bound.iter().any(|b| b.name == "cap")).count();
    assert!(caps > 0 && caps < cases.iter().filter(|c| c.score_mod.iter().any(|m| m.starts_with("softcap"))).count());
}

#[test]
fn names_without_a_closure_are_errors() {
    let draw = |mods: &[&str], masks: &[&str]| {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        Library::draw(&own(mods), &own(masks), [1, 2, 3, 4], &mut Random::new(1)).map(|_| ())
    };
    assert!(draw(&["softcap:2"], &["causal"]).is_ok());
    for (mods, masks) in [(&["soft"][..], &[][..]), (&["softcap:x"], &[]), (&["bias:z"], &[]), (&[], &["q < k"]), (&[], &["window:1"])] {
        assert!(draw(mods, masks).is_err(), "{mods:?} {masks:?}");
    }
}
