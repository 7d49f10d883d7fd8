//! The device tier, open to anybody: an executor whose memory is a place in an arena, and whose stream is the arena.
#![allow(unsafe_code, reason = "the trait's contract is its callers'")]

use sdpa::device::{DeviceBackward, DeviceCall, DeviceForward, OnDevice};
use sdpa::{
    AttentionSpec, BackwardProblem, DType, DeviceExecutor, DevicePrepared, Direction, Error, Executor, ExecutorName, Layout, Operand,
    Prepared, PreparedBackward, Problem, Reason, Shape, SpecError, SpecErrors, Unsupported,
};
use std::sync::{Arc, Mutex};

/// "Device" memory: tensors by their place.
type Arena = Mutex<Vec<Vec<f32>>>;

/// Copies the first operand that it reads to whatever it writes: which operands those are is what is tested.
#[derive(Debug)]
struct Copies;

#[derive(Debug)]
struct Ready(Direction);

const NAME: ExecutorName = ExecutorName::new("copies");

fn no_host<T>() -> Result<T, Unsupported> {
    Err(Unsupported::new(NAME, vec![Reason::Absent("host memory is not taken".to_owned())]))
}

impl Executor for Copies {
    fn name(&self) -> ExecutorName {
        NAME
    }

    fn supports(&self, _: &Problem) -> Result<(), Unsupported> {
        no_host()
    }

    fn prepare(&self, _: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        Ok(no_host()?)
    }

    fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
        no_host()
    }

    fn prepare_backward(&self, _: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        Ok(no_host()?)
    }
}

impl DeviceExecutor for Copies {
    type Memory = usize;
    type Stream = Arena;

    fn prepare_device(&self, _: &Problem) -> Result<OnDevice<usize, Arena>, Error> {
        Ok(Arc::new(Ready(Direction::Forward)))
    }

    fn prepare_device_backward(&self, _: &BackwardProblem) -> Result<OnDevice<usize, Arena>, Error> {
        Ok(Arc::new(Ready(Direction::Backward)))
    }
}

impl DevicePrepared for Ready {
    type Memory = usize;
    type Stream = Arena;

    fn workspace_bytes(&self) -> u64 {
        0
    }

    fn engine(&self) -> String {
        "copies".to_owned()
    }

    unsafe fn submit(&self, stream: &Arena, call: &DeviceCall<'_, usize>) -> Result<(), Error> {
        let mut arena = stream.lock().map_err(|e| Error::failed(NAME, Failed(e.to_string())))?;
        let mut errors = Vec::new();
        let mut source = None;
        for operand in Operand::ALL {
            match (operand.written(self.0), call.operand(operand)) {
                (Some(false), Some(place)) => source = source.or(Some(arena[place].clone())),
                (Some(true), Some(place)) => arena[place] = source.clone().unwrap_or_default(),
                (None, None) => {}
                (Some(_), None) => errors.push(SpecError::new(operand.name(), "nothing", "memory: it is an operand of the pass")),
                (None, Some(_)) => errors.push(SpecError::new(operand.name(), "given", "no operand of the pass")),
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors).into()) }
    }
}

#[derive(Debug, PartialEq)]
struct Failed(String);

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

fn spec() -> AttentionSpec {
    let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 3, seq_kv: 5, dim_qk: 8, dim_v: 8 };
    AttentionSpec::dense(DType::F32, shape, Layout::Bhsd)
}

/// Whatever takes calls in this way, of whichever memory.
fn both<E: DeviceExecutor>(executor: &E) -> [OnDevice<E::Memory, E::Stream>; 2] {
    let forward = executor.prepare_device(&spec().validate().unwrap()).unwrap();
    [forward, executor.prepare_device_backward(&spec().backward().validate().unwrap()).unwrap()]
}

#[test]
fn both_passes_reach_their_operands_by_one_call() {
    let arena: Arena = Mutex::new((0..9).map(|n| vec![n as f32]).collect());
    let [forward, backward] = both(&Copies);
    let call = DeviceForward::new(0, 1, 2, 3);
    // SAFETY: nothing here is unsafe.
    unsafe { forward.submit(&arena, &(&call).into()) }.unwrap();
    assert_eq!(arena.lock().unwrap()[..5], [[0.0], [1.0], [2.0], [0.0], [4.0]]);
    let call = DeviceBackward::new((4, 1, 2), (3, 8), 4, (5, 6, 7));
    // SAFETY: nothing here is unsafe.
    unsafe { backward.submit(&arena, &(&call).into()) }.unwrap();
    assert_eq!(arena.lock().unwrap()[3..], [[0.0], [4.0], [4.0], [4.0], [4.0], [8.0]]);
    // SAFETY: nothing here is unsafe.
    let refused = unsafe { forward.submit(&arena, &(&call).into()) }.unwrap_err().to_string();
    assert!(["d_o", "dq", "dk", "dv"].iter().all(|name| refused.contains(name)), "{refused}");
}

#[test]
fn a_failure_of_the_environment_keeps_its_type() {
    let arena: Arc<Arena> = Arc::default();
    let poisoned = arena.clone();
    let _ = std::thread::spawn(move || {
        let _held = poisoned.lock();
        panic!("while it is held");
    })
    .join();
    let [forward, _] = both(&Copies);
    let call = DeviceForward::new(0, 0, 0, 0);
    // SAFETY: nothing here is unsafe.
    let failed = unsafe { forward.submit(&arena, &(&call).into()) }.unwrap_err();
    assert!(failed.failure::<Failed>().is_some_and(|e| e.0.contains("poison")), "{failed}");
}
