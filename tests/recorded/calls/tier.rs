//! The trait of the device tier.

use super::{backward, recorder, spec, uid, what};
use conformance::recorder::entry::Entry;
use sdpa::DeviceExecutor;
use sdpa::cudnn::DeviceCall;
use sdpa::cudnn::lower::Operand;

/// The trait is a door to the same plans: what is submitted through it is what the raw tier submits, and as much is refused.
#[test]
fn the_trait_of_the_device_tier_submits_what_the_raw_tier_does() {
    let Some(recorder) = recorder() else { return };
    let (spec, stream) = (spec().backward(), recorder.stream());
    let prepared = recorder.executor().prepare_device_backward(&spec.validate().unwrap()).unwrap();
    let (planned, memory) = backward(&recorder, &spec);
    assert_eq!(prepared.workspace_bytes(), planned.workspace_bytes());
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let call = memory.backward_call();
    let raw = recorder.record(|| recorder.backward(&planned, &handle, &call)).1;
    let table = DeviceCall::from(&call);
    let (result, entries) = recorder.record(|| recorder.through_the_trait(&*prepared, &stream, &table));
    result.unwrap();
    assert_eq!(what(&entries), what(&raw));
    let addresses = |entries: &[Entry]| Operand::ALL.map(|operand| entries.iter().find_map(|e| e.address(uid(&planned, operand))));
    assert_eq!(addresses(&entries), addresses(&raw));
    assert!(addresses(&entries).iter().all(Option::is_some));
    // A call of the other pass, with stats as that one has them: every operand too many by name.
    let forward = recorder.executor().prepare_device(&spec.forward.with_stats().validate().unwrap()).unwrap();
    let (result, entries) = recorder.record(|| recorder.through_the_trait(&*forward, &stream, &table));
    let refused = result.unwrap_err().to_string();
    assert!(entries.is_empty() && ["d_o", "dq", "dk", "dv"].iter().all(|name| refused.contains(name)), "{refused}");
    let short = DeviceCall { operands: table.operands.map(|slice| slice.filter(|s| Some(*s) != table.operand(Operand::K))), ..table };
    let (result, entries) = recorder.record(|| recorder.through_the_trait(&*prepared, &stream, &short));
    assert!(entries.is_empty() && result.is_err_and(|e| e.to_string().contains("k: got nothing")));
}
