//! Communicators of NCCL: one rank of a group, which sends and receives device memory.

use crate::device::Device;
use crate::driver::Ptr;
use crate::error::Error;
use crate::load::{Opened, table};
use crate::memory::DeviceSlice;
use crate::nccl::{Nccl, UniqueId};
use crate::stream::Stream;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

table! {
    /// The NCCL functions for communicators, with one exception: `ncclCommInitRankConfig` takes the id by value.
    CommunicatorTable {
        async_error: "ncclCommGetAsyncError" fn(Ptr, *mut c_int);
        finalize: "ncclCommFinalize" fn(Ptr);
        destroy: "ncclCommDestroy" fn(Ptr);
        abort: "ncclCommAbort" fn(Ptr);
        group_start: "ncclGroupStart" fn();
        group_end: "ncclGroupEnd" fn();
        send: "ncclSend" fn(*const std::ffi::c_void, usize, c_int, c_int, Ptr, Ptr);
        receive: "ncclRecv" fn(Ptr, usize, c_int, c_int, Ptr, Ptr);
    }
}

type Init = unsafe extern "C" fn(*mut Ptr, c_int, UniqueId, c_int, *mut Config) -> c_int;

/// `ncclConfig_t` of NCCL 2.18. Newer versions read as many members as `size` and `version` say.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
/// The version whose configuration [`Config`] is.
const CONFIG_VERSION: c_uint = 21_800;
/// `NCCL_CONFIG_UNDEF_INT`: NCCL's default.
const UNDEFINED: c_int = c_int::MIN;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
/// `ncclInt8`: counts are bytes.
const BYTES: c_int = 0;
/// Time between two looks at a communicator that is in progress.
const POLL: Duration = Duration::from_micros(50);

/// The functions for communicators of one library.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    table: CommunicatorTable,
    init: Init,
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Functions")
    }
}

impl Functions {
    pub(crate) fn load(library: &Opened) -> Result<Functions, Error> {
        // SAFETY: the type is that of NCCL's header.
        let init: Init = unsafe { library.function("ncclCommInitRankConfig") }?;
        Ok(Functions { table: CommunicatorTable::load(library)?, init })
    }
}

/// The place of a process or thread in a group of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// The rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The rank among those of this machine, which usually is the ordinal of its device.
    pub local: usize,
}

/// The variables in which launchers tell a process its rank, the number of ranks, and its rank on this machine.
const LAUNCHERS: [(&str, [&str; 3]); 4] = [
    ("torchrun", ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
    ("Open MPI", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ("srun", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"]),
    ("PMI", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"]),
];

impl Rank {
    /// Reads the rank that torchrun, `mpirun` or `srun` gave this process in its environment. The first launcher of whose variables one is set counts.
    ///
    /// # Errors
    /// Returns [`Error::Launcher`] if no launcher's variable is set, or names every variable that is missing or not a number in range.
    pub fn from_env() -> Result<Rank, Error> {
        Rank::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Rank, Error> {
        let Some((launcher, names)) = LAUNCHERS.into_iter().find(|(_, names)| names[..2].iter().any(|name| variable(name).is_some()))
        else {
            let names = LAUNCHERS.map(|(launcher, names)| format!("{} ({launcher})", names[0])).join(", ");
            return Err(Error::Launcher {
                launcher: "no launcher",
                problems: format!("got none of {names}; start the program with a launcher, or pass a Rank"),
            });
        };
        let mut problems = Vec::new();
        let mut number = |name: &str| {
            let text = variable(name);
            let number = text.as_deref().and_then(|text| text.parse::<usize>().ok());
            if number.is_none() {
                problems.push(format!("{name}: got {}, expected a number", text.map_or("nothing".to_owned(), |text| format!("{text:?}"))));
            }
            number.unwrap_or(0)
        };
        let [rank, size, local] = names.map(&mut number);
        if problems.is_empty() && rank >= size {
            problems.push(format!("{}: got {rank}, expected below {size}, the value of {}", names[0], names[1]));
        }
        if problems.is_empty() && local >= size {
            problems.push(format!("{}: got {local}, expected below {size}, the value of {}", names[2], names[1]));
        }
        if problems.is_empty() { Ok(Rank { rank, size, local }) } else { Err(Error::Launcher { launcher, problems: problems.join("; ") }) }
    }
}

/// NCCL's communicator, and the only reference to it. CUDA graphs that captured its transfers share this: NCCL frees a communicator only when these graphs
/// are gone, and a call that frees one waits for them without end.
#[derive(Debug)]
struct Shared {
    nccl: Arc<Nccl>,
    device: &'static Device,
    raw: Ptr,
    /// Whether a CUDA graph has captured transfers.
    captured: AtomicBool,
    /// Whether NCCL has been asked to free the communicator.
    ended: AtomicBool,
}

// SAFETY: a communicator may be used from any thread, by one at a time. Only `Communicator` uses it, until it is ended.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Aborts the communicator. This waits for graphs that captured its transfers.
    fn abort(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: the communicator is live, and is not used again.
        let code = unsafe { (self.nccl.functions().table.abort)(self.raw) };
        if code != SUCCESS {
            tracing::warn!(code, "ncclCommAbort");
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.captured.load(Ordering::Acquire) && !self.ended.load(Ordering::Acquire) {
            self.device.wait_for_destructors();
        }
        self.abort();
    }
}

/// One rank of an NCCL communicator, on one device. Its functions are called by one thread at a time.
///
/// A call that a rank of the group does not answer fails after the deadline. The communicator is then aborted, and every later call fails.
///
/// A CUDA graph that captured [`Communicator::exchange`] keeps NCCL's communicator alive, so graph and communicator may be dropped in any order.
#[derive(Debug)]
pub struct Communicator {
    shared: Arc<Shared>,
    rank: usize,
    size: usize,
    deadline: Duration,
    /// The last capture whose graph shares the communicator.
    in_capture: Option<u64>,
    /// Why the communicator was aborted.
    aborted: Option<String>,
}

impl Communicator {
    /// Joins a group as one of its ranks, and returns when all ranks have joined. `id` is that of [`Nccl::unique_id`] of one rank, which shares it
    /// with the others.
    ///
    /// # Errors
    /// Returns [`Error::Timeout`] if a rank does not join before the deadline, [`Error::Nccl`] if the rank is not below the size, or if NCCL fails.
    pub fn new(nccl: &Arc<Nccl>, device: &'static Device, id: &UniqueId, rank: Rank, deadline: Duration) -> Result<Communicator, Error> {
        let Rank { rank, size, .. } = rank;
        let invalid = |text: String| Error::Nccl { call: "ncclCommInitRankConfig", code: INVALID_ARGUMENT, text };
        let number = |n: usize| c_int::try_from(n).map_err(|_| invalid(format!("size: got {size}, expected below 2^31")));
        if rank >= size {
            return Err(invalid(format!("rank: got {rank}, expected below {size}, the number of ranks")));
        }
        let [c_rank, c_size] = [number(rank)?, number(size)?];
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        };
        let _entered = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointers are to live values of the header's types.
        let code = unsafe { (nccl.functions().init)(&mut raw, c_size, *id, c_rank, &mut config) };
        if raw.is_null() {
            return Err(nccl.error("ncclCommInitRankConfig", if code == SUCCESS { INVALID_USAGE } else { code }));
        }
        let (captured, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { nccl: nccl.clone(), device, raw, captured, ended });
        let mut made = Communicator { shared, rank, size, deadline, in_capture: None, aborted: None };
        made.settle("ncclCommInitRankConfig", code, "the ranks of the communicator to join")?;
        Ok(made)
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the device.
    pub fn device(&self) -> &'static Device {
        self.shared.device
    }

    fn nccl(&self) -> &Nccl {
        &self.shared.nccl
    }

    /// Submits transfers to a stream: each sends or receives one slice of device memory. Transfers of one call progress together; those between two ranks
    /// keep their order. It returns when NCCL has submitted them, which may be before their end. [`Communicator::wait`] waits for it.
    ///
    /// # Safety
    /// Slices lie in live memory of the device, in which no other work reads or writes while the transfers run. The memory lives until the stream has
    /// passed them. The peer of a send receives as many bytes, and the peer of a receive sends as many.
    ///
    /// # Errors
    /// Returns [`Error::OtherDevice`] for a stream of another device and [`Error::Nccl`] for a peer that is no other rank. These two leave the
    /// communicator as it was. After any other error it is aborted.
    pub unsafe fn exchange(
        &mut self,
        stream: &Stream,
        sends: &[(usize, DeviceSlice)],
        receives: &[(usize, DeviceSlice)],
    ) -> Result<(), Error> {
        self.alive("ncclGroupStart")?;
        let device = self.shared.device;
        if stream.device().ordinal() != device.ordinal() {
            let (got, expected) = (device.ordinal(), stream.device().ordinal());
            return Err(Error::OtherDevice { what: "the communicator", got, expected });
        }
        for (call, transfers) in [("ncclSend", sends), ("ncclRecv", receives)] {
            if let Some((peer, _)) = transfers.iter().find(|(peer, _)| *peer >= self.size || *peer == self.rank) {
                let text = format!("peer: got {peer}, expected a rank below {} other than {}", self.size, self.rank);
                return Err(Error::Nccl { call, code: INVALID_ARGUMENT, text });
            }
        }
        let _entered = device.enter()?;
        if let Err(error) = self.share_with_graph(stream) {
            self.abort(&error.to_string());
            return Err(error);
        }
        let table = self.nccl().functions().table;
        // SAFETY: it takes nothing.
        self.submitted("ncclGroupStart", unsafe { (table.group_start)() })?;
        let mut first = Ok(());
        for (peer, slice) in sends {
            let from = std::ptr::with_exposed_provenance(slice.address as usize);
            // SAFETY: the caller vouches for the slice; communicator and stream are live.
            let code = unsafe { (table.send)(from, slice.bytes as usize, BYTES, *peer as c_int, self.shared.raw, stream.raw().0) };
            first = first.and_then(|()| self.submitted("ncclSend", code));
        }
        for (peer, slice) in receives {
            let to = std::ptr::with_exposed_provenance_mut(slice.address as usize);
            // SAFETY: as above.
            let code = unsafe { (table.receive)(to, slice.bytes as usize, BYTES, *peer as c_int, self.shared.raw, stream.raw().0) };
            first = first.and_then(|()| self.submitted("ncclRecv", code));
        }
        // A group that has begun must end, also after an error.
        // SAFETY: it takes nothing.
        let code = unsafe { (table.group_end)() };
        if let Err(error) = first {
            self.abort(&error.to_string());
            return Err(error);
        }
        self.settle("ncclGroupEnd", code, "NCCL to submit transfers")
    }

    /// Waits until a stream has passed its present end, and meanwhile looks for failures of the communicator. It is for after
    /// [`Communicator::exchange`]: waiting for the stream alone would not end if a rank had stopped.
    ///
    /// # Errors
    /// Returns [`Error::Timeout`] at the deadline, [`Error::Nccl`] if NCCL reports a failure, or a driver error. The communicator is then aborted.
    pub fn wait(&mut self, stream: &Stream) -> Result<(), Error> {
        self.alive("ncclCommGetAsyncError")?;
        let end = stream.record(false)?;
        let began = Instant::now();
        loop {
            let result = match end.passed() {
                Ok(true) => return Ok(()),
                Ok(false) => self.failure(),
                Err(error) => Err(error),
            };
            let result = result.and_then(|()| self.in_time(began, "transfers of a stream"));
            if let Err(error) = result {
                self.abort(&error.to_string());
                return Err(error);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Makes the graph that a stream's capture builds share the communicator, once for each capture.
    fn share_with_graph(&mut self, stream: &Stream) -> Result<(), Error> {
        let (device, raw) = (self.shared.device, stream.raw().0);
        if !device.is_capturing(raw) {
            return Ok(());
        }
        let capture = device.capture_of(raw)?;
        if self.in_capture == Some(capture) {
            return Ok(());
        }
        device.keep(raw, Box::new(self.shared.clone()))?;
        self.shared.captured.store(true, Ordering::Release);
        self.in_capture = Some(capture);
        Ok(())
    }

    /// Ends the use of the communicator after all ranks have done so. Graphs that captured its transfers must be dropped before. Dropping the communicator
    /// instead aborts it, which does not wait for the other ranks, as soon as these graphs are gone.
    ///
    /// # Errors
    /// Returns [`Error::Timeout`] if other ranks, or graphs, do not end before the deadline, or [`Error::Nccl`].
    pub fn finish(mut self) -> Result<(), Error> {
        self.alive("ncclCommFinalize")?;
        let (device, began) = (self.shared.device, Instant::now());
        while Arc::strong_count(&self.shared) > 1 {
            device.release_retired();
            self.in_time(began, "CUDA graphs with transfers of the communicator to be dropped")?;
            std::thread::sleep(POLL);
        }
        if self.shared.captured.load(Ordering::Acquire) {
            device.wait_for_destructors();
        }
        let _entered = device.enter()?;
        // SAFETY: the communicator is live.
        let code = unsafe { (self.nccl().functions().table.finalize)(self.shared.raw) };
        self.settle("ncclCommFinalize", code, "the other ranks to finish")?;
        self.shared.ended.store(true, Ordering::Release);
        // SAFETY: the communicator is live and finalised, and is not used again.
        let code = unsafe { (self.nccl().functions().table.destroy)(self.shared.raw) };
        self.aborted = Some("the communicator is finished".to_owned());
        if code == SUCCESS { Ok(()) } else { Err(self.nccl().error("ncclCommDestroy", code)) }
    }

    /// Aborts the communicator: transfers end, and every later call fails with the reason. Other ranks notice it at their deadline, or earlier.
    pub fn abort(&mut self, reason: &str) {
        if self.aborted.is_some() {
            return;
        }
        self.aborted = Some(reason.to_owned());
        if Arc::strong_count(&self.shared) > 1 {
            // NCCL ends the transfers at once, and then waits for the graphs that captured some.
            let shared = self.shared.clone();
            std::thread::spawn(move || shared.abort());
        } else {
            self.shared.abort();
        }
    }

    fn alive(&self, call: &'static str) -> Result<(), Error> {
        self.aborted.as_ref().map_or(Ok(()), |why| {
            Err(Error::Nccl { call, code: INVALID_USAGE, text: format!("the communicator was aborted before: {why}; make a new one") })
        })
    }

    /// Returns an error if the result of a call within a group is one.
    fn submitted(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        if code == SUCCESS || code == IN_PROGRESS { Ok(()) } else { Err(self.nccl().error(call, code)) }
    }

    fn in_time(&self, began: Instant, what: &'static str) -> Result<(), Error> {
        if began.elapsed() < self.deadline { Ok(()) } else { Err(Error::Timeout { what, after: self.deadline }) }
    }

    /// Returns an error if the communicator has failed.
    fn failure(&self) -> Result<(), Error> {
        let state = self.state()?;
        self.submitted("ncclCommGetAsyncError", state)
    }

    fn state(&self) -> Result<c_int, Error> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is live, and the pointer is to a live integer.
        let code = unsafe { (self.nccl().functions().table.async_error)(self.shared.raw, &mut state) };
        if code == SUCCESS { Ok(state) } else { Err(self.nccl().error("ncclCommGetAsyncError", code)) }
    }

    /// Waits for the end of a call that does not block. After an error the communicator is aborted.
    fn settle(&mut self, call: &'static str, code: c_int, what: &'static str) -> Result<(), Error> {
        let began = Instant::now();
        let mut state = Ok(code);
        let error = loop {
            match state {
                Ok(SUCCESS) => return Ok(()),
                Ok(IN_PROGRESS) => {}
                Ok(code) => break self.nccl().error(call, code),
                Err(error) => break error,
            }
            if let Err(error) = self.in_time(began, what) {
                break error;
            }
            std::thread::sleep(POLL);
            state = self.state();
        };
        self.abort(&error.to_string());
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Rank, String> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        Rank::from_variables(find).map_err(|error| error.to_string())
    }

    #[test]
    fn launchers_tell_the_rank() {
        assert_eq!(from(&[("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")]), Ok(Rank { rank: 3, size: 4, local: 1 }));
        assert_eq!(from(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")]), Ok(Rank { rank: 0, size: 2, local: 0 }));
        let of_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        assert_eq!(from(&of_mpi).map(|rank| [rank.rank, rank.size, rank.local]), Ok([1, 8, 1]));
        // torchrun within an allocation of srun: the nearer launcher counts.
        let both = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];
        assert_eq!(from(&both).map(|rank| rank.rank), Ok(1));
    }

    #[test]
    fn wrong_variables_are_all_named() {
        let missing = from(&[("RANK", "x"), ("LOCAL_RANK", "0")]).unwrap_err();
        assert_eq!(missing, "torchrun: RANK: got \"x\", expected a number; WORLD_SIZE: got nothing, expected a number");
        let beyond = from(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]).unwrap_err();
        assert_eq!(beyond, "torchrun: RANK: got 2, expected below 2, the value of WORLD_SIZE");
        assert!(from(&[]).unwrap_err().starts_with("no launcher: got none of RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI)"));
    }
}
