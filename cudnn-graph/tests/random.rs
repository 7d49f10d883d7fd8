//! Random graphs: what `verify` accepts, `encode` encodes for any version without anything newer, and the interpreter computes. A graph with a
//! random mistake is refused or still computes; nothing panics. `offline` passes the same graphs to cuDNN.

mod generator;

use cudnn_graph::ir::interp::{Precision, run_all};
use cudnn_graph::ir::{Graph, Verified};
use cudnn_graph::{Version, encode};
use generator::{graph, inputs, paths};
use proptest::prelude::*;

fn holds(graph: &Verified) {
    for version in [Version::OLDEST, Version::new(9, 19, 0), Version::new(9, 27, 0)] {
        match encode(graph, version) {
            Ok(program) => {
                for descriptor in &program.descriptors {
                    assert!(descriptor.kind.since() <= version, "{} in {version}", descriptor.kind);
                    for setting in &descriptor.settings {
                        assert!(setting.attribute.since() <= version, "{} in {version}", setting.attribute);
                        assert!(setting.values.are(setting.ty), "{} is {:?}, not {}", setting.attribute, setting.values, setting.ty);
                    }
                }
            }
            Err(e) => {
                assert!(version < Version::new(9, 27, 0), "{e}");
                assert!(e.needs.iter().all(|(_, since)| *since > version), "{e}");
            }
        }
    }
    for precision in [Precision::F64, Precision::F32] {
        let all = run_all(graph, &inputs(graph), precision).unwrap_or_else(|e| panic!("{e}\n{graph}"));
        for (id, value) in all {
            assert_eq!(value.dims, graph.get(id).unwrap().dims.0, "{id}\n{graph}");
            assert_eq!(value.data.len() as i64, graph.get(id).unwrap().dims.elements().unwrap(), "{id}\n{graph}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_the_builder_makes_is_accepted_encoded_and_computed(seed in any::<u64>()) {
        let graph = graph(seed);
        let text = graph.to_string();
        holds(&graph.verify().unwrap_or_else(|e| panic!("{e}\n{text}")));
    }

    #[test]
    fn a_graph_with_a_changed_number_is_refused_or_computed(seed in any::<u64>(), place in any::<prop::sample::Index>(), change in -1i64..4) {
        let mut json = serde_json::to_value(graph(seed)).unwrap();
        let mut numbers = Vec::new();
        paths(&json, &mut String::new(), &mut numbers);
        let path = &numbers[place.index(numbers.len())];
        *json.pointer_mut(path).unwrap() = change.into();
        // A number that does not fit the field is refused by serde.
        if let Ok(graph) = serde_json::from_value::<Graph>(json)
            && let Ok(graph) = graph.verify()
        {
            let _ = encode(&graph, Version::new(9, 27, 0));
            let _ = run_all(&graph, &inputs(&graph), Precision::F64);
        }
    }
}
