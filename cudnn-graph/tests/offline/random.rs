//! Random graphs in the real cuDNN: it finalizes the descriptors of every graph that `verify` accepts, or calls the graph unsupported, which depends on
//! its version.

use crate::generator::{graph, inputs, paths};
use crate::said_by_all;
use cudnn_graph::ir::Graph;
use cudnn_graph::ir::interp::{Precision, run_all};
use cudnn_graph::{DType, Library, Search, encode};
use std::collections::BTreeMap;

/// Graphs of the generator, and as many changes of each.
const GRAPHS: u64 = 4000;
const CHANGES: u64 = 7;

/// A graph with another number or another type somewhere, or with a tensor that lacks its first axis; `None` if the change makes no graph.
fn changed(graph: &Graph, n: u64) -> Option<Graph> {
    let mut json = serde_json::to_value(graph).unwrap();
    let mut places = Vec::new();
    paths(&json, &mut String::new(), &mut places);
    let pick = |count: usize, salt: u64| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ salt) as usize % count;
    if n % CHANGES == CHANGES - 1 {
        let tensors = json["tensors"].as_array_mut().unwrap();
        let n = pick(tensors.len(), 5);
        for list in ["dims", "strides"] {
            tensors[n][list].as_array_mut().unwrap().remove(0);
        }
    } else if n.is_multiple_of(2) {
        let place = &places[pick(places.len(), 1)];
        *json.pointer_mut(place).unwrap() = ([0, 1, 2, 3, 5, -1][pick(6, 2)]).into();
    } else {
        let mut types = Vec::new();
        names(&json, &mut String::new(), &mut types);
        let place = &types[pick(types.len(), 3)];
        *json.pointer_mut(place).unwrap() = DType::ALL[pick(DType::ALL.len(), 4)].name().into();
    }
    serde_json::from_value(json).ok()
}

/// Collects the JSON pointers of all element types.
fn names(json: &serde_json::Value, here: &mut String, found: &mut Vec<String>) {
    match json {
        serde_json::Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                names(item, &mut format!("{here}/{n}"), found);
            }
        }
        serde_json::Value::Object(fields) => {
            for (key, item) in fields {
                let place = format!("{here}/{key}");
                if item.is_string() && (key == "dtype" || key == "compute") {
                    found.push(place);
                } else {
                    names(item, &mut place.clone(), found);
                }
            }
        }
        serde_json::Value::Number(_) | serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => {}
    }
}

/// Finalizes random graphs in the runtime of this process, and fails with one graph per kind of refusal. Runs only if it is named.
#[test]
fn finalizer() {
    if !std::env::args().any(|argument| argument == "--exact") {
        return;
    }
    let library = Library::load(&Search::default()).unwrap_or_else(|e| panic!("{e}"));
    let (mut finalized, mut too_new, mut refused) = (0u64, 0u64, BTreeMap::<String, String>::new());
    for seed in 0..GRAPHS {
        let plain = graph(seed);
        let values = inputs(&plain);
        run_all(&plain.clone().verify().unwrap(), &values, Precision::F64).unwrap_or_else(|e| panic!("{e}\n{plain}"));
        let all = (0..CHANGES).filter_map(|n| changed(&plain, seed * CHANGES + n)).collect::<Vec<_>>();
        for graph in std::iter::once(plain).chain(all) {
            let Ok(graph) = graph.verify() else { continue };
            let Ok(program) = encode(&graph, library.version()) else {
                too_new += 1;
                continue;
            };
            finalized += 1;
            if let Err(error) = program.finalize(library)
                && !error.is_unsupported()
            {
                let error = error.to_string();
                let kind: String = error.chars().filter(|c| !c.is_ascii_digit()).collect();
                let found = format!("{error}\n{graph}");
                let shortest = refused.entry(kind).or_insert_with(|| found.clone());
                if found.len() < shortest.len() {
                    *shortest = found;
                }
            }
        }
    }
    println!("finalized {finalized}, too new {too_new}");
    assert!(refused.is_empty(), "verify accepts what cuDNN refuses:\n\n{}", refused.values().cloned().collect::<Vec<_>>().join("\n"));
    assert!(finalized > 2 * GRAPHS, "only {finalized} graphs were finalized");
}

#[test]
fn cudnn_finalizes_what_verify_accepts() {
    said_by_all("random::finalizer");
}
