//! NCCL communicators on all GPUs of one process, a thread each: contents of transfers, deadlines, and the refusal of another device's stream.
#![allow(unsafe_code)]

use crate::setup::Result;
use sdpa_driver::{Buffer, Communicator, Device, DeviceSlice, Driver, Error, Nccl, Rank, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the transfers between two ranks, in one group. They start at odd addresses too.
const SIZES: [usize; 7] = [1, 3, 100, 4096, 65_537, 1 << 20, (4 << 20) + 13];
/// Bytes between the slices of a buffer, which nothing may change.
const GAP: usize = 5;
const UNTOUCHED: u8 = 0xee;
const LONG: Duration = Duration::from_secs(60);
/// Joining takes a part of it, and so does the first transfer.
const SHORT: Duration = Duration::from_secs(8);
/// The longest time from a deadline to the error.
const GRACE: Duration = Duration::from_secs(3);

type Outcome<T> = std::result::Result<T, String>;

/// A phase: what it checks, and the check of one rank, which returns the number of transfers that it compared.
type Phase<'a> = (&'a str, Duration, &'a (dyn Fn(&mut Communicator, &Stream) -> Outcome<usize> + Sync));

/// Byte `n` of transfer `t` from a rank to another.
fn byte(from: usize, to: usize, round: usize, t: usize, n: usize) -> u8 {
    let seed = ((from * 64 + to) * 1024 + round) * 16 + t;
    let x = (n as u32).wrapping_mul(0x9e37_79b1) ^ (seed as u32).wrapping_mul(0x85eb_ca6b);
    ((x ^ (x >> 15)).wrapping_mul(0x2c1b_3ced) >> 24) as u8
}

/// The first byte of transfer `t` with the `n`th peer.
fn first(n: usize, t: usize) -> usize {
    let before = |sizes: &[usize]| sizes.iter().map(|size| size + GAP).sum::<usize>();
    n * before(&SIZES) + before(&SIZES[..t])
}

fn slices(buffer: &Buffer, peers: &[usize]) -> Vec<(usize, DeviceSlice)> {
    let slice = |n, t| DeviceSlice { address: buffer.address() + first(n, t) as u64, bytes: SIZES[t] as u64 };
    peers.iter().enumerate().flat_map(|(n, peer)| (0..SIZES.len()).map(move |t| (*peer, slice(n, t)))).collect()
}

/// Two buffers, and the peers of a rank.
struct Room {
    peers: Vec<usize>,
    from: Buffer,
    to: Buffer,
    bytes: usize,
}

impl Room {
    fn new(own: &Communicator) -> Outcome<Room> {
        let peers: Vec<usize> = (0..own.size()).filter(|peer| *peer != own.rank()).collect();
        let bytes = first(peers.len(), 0);
        let new = || Buffer::new(own.device(), bytes).map_err(text);
        Ok(Room { from: new()?, to: new()?, peers, bytes })
    }

    /// Sends and receives every size with every peer, and waits.
    fn exchange(&self, own: &mut Communicator, stream: &Stream) -> std::result::Result<(), Error> {
        // SAFETY: the slices lie in the buffers, which outlive the wait or the abort; every rank makes the same transfers.
        unsafe { own.exchange(stream, &slices(&self.from, &self.peers), &slices(&self.to, &self.peers)) }?;
        own.wait(stream)
    }

    /// One round with contents that depend on the sender, the receiver, the round, the transfer and the byte. Returns the number of transfers compared.
    fn round(&mut self, own: &mut Communicator, stream: &Stream, round: usize) -> Outcome<usize> {
        let rank = own.rank();
        let mut data = vec![0; self.bytes];
        for (n, peer) in self.peers.iter().enumerate() {
            for (t, size) in SIZES.into_iter().enumerate() {
                (0..size).for_each(|at| data[first(n, t) + at] = byte(rank, *peer, round, t, at));
            }
        }
        self.from.upload(stream, 0, &data).map_err(text)?;
        self.to.fill(stream, UNTOUCHED).map_err(text)?;
        self.exchange(own, stream).map_err(text)?;
        let mut got = vec![0; self.bytes];
        self.to.download(stream, 0, &mut got).map_err(text)?;
        for (n, peer) in self.peers.iter().enumerate() {
            for (t, size) in SIZES.into_iter().enumerate() {
                let at = first(n, t);
                let wrong = (0..size).find(|i| got[at + i] != byte(*peer, rank, round, t, *i));
                if let Some(i) = wrong {
                    let (got, expected) = (got[at + i], byte(*peer, rank, round, t, i));
                    return Err(format!("round {round}, {size} bytes from rank {peer}: byte {i}: got {got}, expected {expected}"));
                }
                if got[at + size..at + size + GAP] != [UNTOUCHED; GAP] {
                    return Err(format!("round {round}: bytes behind the {size} bytes from rank {peer} were written"));
                }
            }
        }
        Ok(self.peers.len() * SIZES.len())
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

fn ensure(right: bool, wrong: impl FnOnce() -> String) -> Outcome<()> {
    if right { Ok(()) } else { Err(wrong()) }
}

/// All ranks but the last one exchange, and it does not answer. They must get a timeout within the deadline, and their device must stay usable.
fn unanswered(own: &mut Communicator, stream: &Stream, connected: bool) -> Outcome<usize> {
    let mut room = Room::new(own)?;
    let mut compared = if connected { room.round(own, stream, 0)? } else { 0 };
    if own.rank() == own.size() - 1 {
        // Alive, but with another task.
        std::thread::sleep(2 * SHORT + GRACE);
        return Ok(compared);
    }
    let began = Instant::now();
    let error = match room.exchange(own, stream) {
        Ok(()) => return Err("an exchange without an answer: got success, expected a timeout".to_owned()),
        Err(error) => error,
    };
    let took = began.elapsed();
    ensure(matches!(error, Error::Timeout { .. }), || format!("an exchange without an answer: got {error}, expected a timeout"))?;
    // The submission and the wait have a deadline each.
    ensure(took >= SHORT && took < 2 * SHORT + GRACE, || format!("the timeout came after {took:.2?}, with a deadline of {SHORT:?}"))?;
    println!("  rank {}: after {took:.2?}: {error}", own.rank());
    let later = room.exchange(own, stream).err().map_or("success".to_owned(), text);
    ensure(later.contains("was aborted before"), || format!("a later exchange: got {later}, expected the reason of the abort"))?;
    let (data, mut got) = ([own.rank() as u8 + 1; 64], [0; 64]);
    room.from.upload(stream, 0, &data).and_then(|()| room.from.download(stream, 0, &mut got)).map_err(text)?;
    ensure(got == data, || "the stream after the abort: other bytes than were written".to_owned())?;
    compared += 1;
    Ok(compared)
}

/// Every peer and stream that an exchange refuses leaves the communicator as it was.
fn refused(own: &mut Communicator, stream: &Stream, devices: &[&'static Device]) -> Outcome<usize> {
    let mut room = Room::new(own)?;
    let (rank, size) = (own.rank(), own.size());
    let other = devices[(rank + 1) % size].stream().map_err(text)?;
    // SAFETY: nothing is transferred.
    let error = unsafe { own.exchange(&other, &slices(&room.from, &room.peers), &slices(&room.to, &room.peers)) };
    let (own_ordinal, others) = (own.device().ordinal(), other.device().ordinal());
    let right =
        matches!(error, Err(Error::OtherDevice { what: "the communicator", got, expected }) if (got, expected) == (own_ordinal, others));
    ensure(right, || format!("a stream of device {others}: got {error:?}, expected OtherDevice"))?;
    for peer in [rank, size] {
        // SAFETY: nothing is transferred.
        let error = unsafe { own.exchange(stream, &slices(&room.from, &[peer]), &[]) };
        let right = matches!(&error, Err(Error::Nccl { call: "ncclSend", text, .. }) if text.starts_with(&format!("peer: got {peer},")));
        ensure(right, || format!("peer {peer} of rank {rank}: got {error:?}, expected a refusal"))?;
    }
    room.round(own, stream, 1)
}

/// Runs a phase on every device, with a thread and a communicator for each. Returns the number of transfers, or the failures of the ranks.
fn on_ranks(nccl: &Arc<Nccl>, devices: &[&'static Device], phase: &Phase<'_>) -> Outcome<usize> {
    let (_, deadline, check) = phase;
    let id = nccl.unique_id().map_err(text)?;
    let results: Vec<Outcome<usize>> = std::thread::scope(|scope| {
        let start = |(rank, device): (usize, &&'static Device)| {
            let (device, size) = (*device, devices.len());
            scope.spawn(move || {
                let mut own = Communicator::new(nccl, device, &id, Rank { rank, size, local: rank }, *deadline).map_err(text)?;
                let stream = device.stream().map_err(text)?;
                let compared = check(&mut own, &stream)?;
                // Ranks whose communicator was aborted have nothing to finish.
                if *deadline == LONG { own.finish().map_err(text).map(|()| compared) } else { Ok(compared) }
            })
        };
        let threads: Vec<_> = devices.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("the thread panicked".to_owned()))).collect()
    });
    let failed: Vec<String> =
        results.iter().enumerate().filter_map(|(rank, r)| r.as_ref().err().map(|e| format!("rank {rank}: {e}"))).collect();
    if failed.is_empty() { Ok(results.into_iter().flatten().sum()) } else { Err(failed.join("; ")) }
}

pub(crate) fn run(rounds: u64) -> Result<()> {
    if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
        // Multicast over NVLink stays off.
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    }
    let driver = Driver::load(None)?;
    let count = driver.device_count()?;
    if count < 2 {
        return Err(format!("several GPUs are needed, and the driver sees {count}").into());
    }
    let devices = (0..count).map(|ordinal| driver.device(ordinal)).collect::<std::result::Result<Vec<_>, _>>()?;
    let nccl = Arc::new(Nccl::load(None)?);
    println!("NCCL {} of {} on {count} devices", nccl.version().map(|n| n.to_string()).join("."), nccl.path().display());
    let all = |own: &mut Communicator, stream: &Stream| {
        let mut room = Room::new(own)?;
        (0..rounds as usize).map(|round| room.round(own, stream, round)).sum()
    };
    let first_unanswered = |own: &mut Communicator, stream: &Stream| unanswered(own, stream, false);
    let later_unanswered = |own: &mut Communicator, stream: &Stream| unanswered(own, stream, true);
    let refusals = |own: &mut Communicator, stream: &Stream| refused(own, stream, &devices);
    let phases: [Phase<'_>; 5] = [
        ("sends and receives of several sizes between all pairs", LONG, &all),
        ("refusals of streams and peers", LONG, &refusals),
        ("a rank that answers no first exchange", SHORT, &first_unanswered),
        ("a rank that answers no later exchange", SHORT, &later_unanswered),
        ("new communicators after aborts", LONG, &refusals),
    ];
    let mut failed = 0;
    for phase in &phases {
        let began = Instant::now();
        let outcome = on_ranks(&nccl, &devices, phase);
        let took = began.elapsed();
        match outcome {
            Ok(compared) => println!("passed: {}: {compared} transfers compared, {took:.1?}", phase.0),
            Err(why) => {
                failed += 1;
                println!("FAILED: {}: {why}", phase.0);
            }
        }
    }
    println!("communicators: {} passed, {failed} failed", phases.len() - failed);
    if failed == 0 { Ok(()) } else { Err(format!("{failed} phases of communicators failed").into()) }
}
