//! Lists of blocks that are kept from one call to the next.

use super::executor;
use conformance::emulated::{self, Emulated, boxes, submit, with_block_map};
use sdpa::cuda::{CudaExecutor, CudaPlan, Family};
use sdpa::device::{DeviceCall, DeviceParam, DevicePrepared, DeviceValue};
use sdpa::nvidia::race::Memory;
use sdpa::nvidia::{Job, Stream};
use sdpa::{AttentionSpec, DType, Layout, Shape};
use std::sync::Arc;

/// Two blocks of keys: whichever adds to a gradient of queries first, sums have the same bits.
const SHAPE: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 300, seq_kv: 250, dim_qk: 64, dim_v: 64 };

/// Of the first 100 keys, where the number is the default scale, 1/8.
const RULE: &str = "scalar first = 0.5; k < i32(first * 800.0)";

fn plans(executor: &CudaExecutor, mask: &str) -> [(Job, Arc<CudaPlan>); 2] {
    let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).with_stats().mask(mask.parse().unwrap());
    let (forward, backward) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
    let made = [executor.attention(&forward).unwrap().0, executor.gradient(&backward).unwrap().0];
    let [there, back] = made;
    [(forward.into(), there), (backward.into(), back)]
}

/// The bytes of the results, and how many boxes were brought.
fn told(plan: &CudaPlan, stream: &Stream, memory: &mut Memory<'_>, first: f32) -> (Vec<u8>, u64) {
    memory.poison().unwrap();
    let before = boxes();
    memory.call(|call| {
        let params = [DeviceParam::new("first", DeviceValue::Scalar(first))];
        submit(plan, stream, &DeviceCall { params: &params, workspace: None, ..*call }).unwrap();
    });
    let brought = boxes() - before;
    (memory.bytes().unwrap(), brought)
}

fn lists_are_kept(executor: &CudaExecutor) {
    let stream = executor.device().stream().unwrap();
    for (job, plan) in plans(executor, RULE) {
        let mut memory = Memory::new(&stream, &job, plan.workspace_bytes()).unwrap();
        let fresh = told(&plan, &stream, &mut memory, 0.125);
        let wider = told(&plan, &stream, &mut memory, 0.25);
        assert!(fresh.0 != wider.0 && fresh.1 < wider.1, "{}", job.name());
        memory.poison().unwrap();
        let mapped = memory.call(|call| with_block_map(&plan, &stream, call)).unwrap();
        assert!(memory.bytes().unwrap() == fresh.0, "{}", job.name());
        assert!(told(&mapped, &stream, &mut memory, 0.125) == fresh, "{}", job.name());
        assert!(mapped.workspace_bytes() < plan.workspace_bytes(), "{}", job.name());
        // Blocks that the first call dropped are not looked at again.
        assert_eq!(told(&mapped, &stream, &mut memory, 0.25).1, fresh.1, "{}", job.name());
        // Around a map there is none to make.
        let again = memory.call(|call| with_block_map(&mapped, &stream, call)).unwrap();
        assert!(Arc::ptr_eq(&again, &mapped));
        assert!(told(&plan, &stream, &mut memory, 0.25) == wider, "{}", job.name());
    }
    // Nor where a mask asks for places alone.
    for (job, plan) in plans(executor, "k < 100") {
        let memory = Memory::new(&stream, &job, plan.workspace_bytes()).unwrap();
        let same = memory.call(|call| with_block_map(&plan, &stream, call)).unwrap();
        assert!(Arc::ptr_eq(&same, &plan));
    }
}

#[test]
fn lists_of_a_call_are_kept_for_others() {
    let Some(executor) = executor() else { return };
    lists_are_kept(&executor);
    lists_are_kept(&emulated::executor_on(Emulated::A100, Some(Family::Mma)).unwrap());
}

#[test]
fn a_call_that_is_wrong_keeps_nothing() {
    let Some(executor) = executor() else { return };
    let stream = executor.device().stream().unwrap();
    let [(job, plan), _] = plans(&executor, RULE);
    let memory = Memory::new(&stream, &job, plan.workspace_bytes()).unwrap();
    let wrong = memory.call(|call| with_block_map(&plan, &stream, &DeviceCall { params: &[], ..*call }));
    assert!(wrong.unwrap_err().to_string().contains("first"));
}
