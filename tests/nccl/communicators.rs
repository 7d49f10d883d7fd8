//! Communicators over the emulation of NCCL, whose ranks are threads of this process. It reads and writes the memory of the emulated driver.

use conformance::emulated::{exchange, find};
use conformance::say::skip;
use sdpa_driver::{Buffer, Communicator, Device, DeviceSlice, Driver, Error, Nccl, Rank, Stream, UniqueId};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(200);

pub(super) fn open() -> Option<(Arc<Nccl>, &'static Device)> {
    let file = find().map_err(|why| skip("nccl", &why)).ok()?;
    let nccl = Nccl::load(Some(&file)).unwrap();
    Some((Arc::new(nccl), Driver::load(Some(&file)).unwrap().device(0).unwrap()))
}

/// Runs a function on each of several ranks, each with a communicator and a stream, and returns the results in the order of the ranks.
fn on_ranks<T: Send>(size: usize, deadline: Duration, run: impl Fn(&mut Communicator, &Stream) -> T + Sync) -> Option<Vec<T>> {
    let (nccl, device) = open()?;
    let id = nccl.unique_id().unwrap();
    Some(std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (nccl, run) = (&nccl, &run);
            scope.spawn(move || {
                let mut own = Communicator::new(nccl, device, &id, Rank { rank, size, local: 0 }, deadline).unwrap();
                assert_eq!((own.rank(), own.size(), own.device().ordinal()), (rank, size, 0));
                run(&mut own, &device.stream().unwrap())
            })
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }))
}

fn slice(buffer: &Buffer, first: usize, bytes: usize) -> DeviceSlice {
    DeviceSlice { address: buffer.address() + first as u64, bytes: bytes as u64 }
}

/// Sends the `n`th run of 100 bytes to rank `n`, and receives one from each rank.
fn all_to_all(own: &mut Communicator, stream: &Stream, round: u8) -> Result<Vec<u8>, Error> {
    let (rank, size) = (own.rank(), own.size());
    let byte = |from: usize, to: usize, n: usize| (from * 31 + to * 7 + n) as u8 ^ round;
    let data: Vec<u8> = (0..100 * size).map(|n| byte(rank, n / 100, n % 100)).collect();
    let (mut from, mut to) = (Buffer::new(own.device(), data.len())?, Buffer::new(own.device(), data.len())?);
    from.upload(stream, 0, &data)?;
    to.fill(stream, 0xee)?;
    let peers = || (0..size).filter(|peer| *peer != rank);
    let sends: Vec<_> = peers().map(|peer| (peer, slice(&from, 100 * peer, 100))).collect();
    let receives: Vec<_> = peers().map(|peer| (peer, slice(&to, 100 * peer, 100))).collect();
    exchange(own, stream, &sends, &receives)?;
    own.wait(stream)?;
    let mut got = vec![0; data.len()];
    to.download(stream, 0, &mut got)?;
    for peer in 0..size {
        let expected: Vec<u8> = (0..100).map(|n| if peer == rank { 0xee } else { byte(peer, rank, n) }).collect();
        assert_eq!(got[100 * peer..100 * (peer + 1)], expected, "rank {rank}, from {peer}, round {round}");
    }
    Ok(got)
}

#[test]
fn ranks_exchange_slices_of_device_memory() {
    for size in [1, 2, 3, 8] {
        let Some(results) = on_ranks(size, DEADLINE, |own, stream| (0..3).try_for_each(|round| all_to_all(own, stream, round).map(drop)))
        else {
            return;
        };
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn a_rank_that_does_not_join_is_an_error_within_the_deadline() {
    let Some((nccl, device)) = open() else { return };
    let id = nccl.unique_id().unwrap();
    let error = Communicator::new(&nccl, device, &id, Rank { rank: 0, size: 2, local: 0 }, SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout { what: "the ranks of the communicator to join", after: SHORT }), "{error}");
}

#[test]
fn a_rank_that_does_not_send_is_an_error_within_the_deadline() {
    let results = on_ranks(2, SHORT, |own, stream| {
        if own.rank() == 1 {
            // Alive, but with another task.
            std::thread::sleep(3 * SHORT);
            return None;
        }
        let error = all_to_all(own, stream, 0).unwrap_err();
        let later = all_to_all(own, stream, 0).unwrap_err();
        Some([error, later].map(|error| error.to_string()))
    });
    let Some(results) = results else { return };
    let [error, later] = results[0].clone().unwrap();
    assert_eq!(error, "waited 200ms for NCCL to submit transfers; a rank may be stopped, or wait for another exchange");
    assert!(later.contains("the communicator was aborted before: waited 200ms") && later.ends_with("make a new one"), "{later}");
}

#[test]
fn a_rank_that_aborts_is_an_error_of_the_others() {
    let results = on_ranks(3, DEADLINE, |own, stream| {
        if own.rank() == 2 {
            own.abort("this rank cannot go on");
        }
        all_to_all(own, stream, 0).unwrap_err().to_string()
    });
    let Some(results) = results else { return };
    assert!(results[2].contains("this rank cannot go on"), "{results:?}");
    // A rank whose peer aborted first may stop before it receives from the third.
    assert!(results[..2].iter().all(|error| error.contains("remote process exited")), "{results:?}");
}

#[test]
fn another_number_of_bytes_is_an_error() {
    let results = on_ranks(2, DEADLINE, |own, stream| {
        let buffer = Buffer::new(own.device(), 64).unwrap();
        let all = [(1 - own.rank(), slice(&buffer, 0, 16 * (own.rank() + 1)))];
        let result = if own.rank() == 0 { exchange(own, stream, &all, &[]) } else { exchange(own, stream, &[], &all) };
        let result = result.and_then(|()| own.wait(stream)).map_err(|error| error.to_string());
        if own.rank() == 0 {
            // The other rank needs what was sent.
            std::thread::sleep(SHORT);
        }
        result
    });
    let Some(results) = results else { return };
    assert_eq!(results[0], Ok(()));
    assert_eq!(results[1], Err("ncclGroupEnd returned 5: invalid usage".to_owned()));
}

#[test]
fn wrong_arguments_leave_the_communicator_as_it_was() {
    let Some(file) = find().ok() else { return };
    let results = on_ranks(2, DEADLINE, |own, stream| {
        let buffer = Buffer::new(own.device(), 8).unwrap();
        for peer in [own.rank(), 2] {
            let error = exchange(own, stream, &[(peer, slice(&buffer, 0, 8))], &[]).unwrap_err();
            let text = format!("ncclSend returned 4: peer: got {peer}, expected a rank below 2 other than {}", own.rank());
            assert_eq!(error.to_string(), text);
        }
        let other = Driver::load(Some(&file)).unwrap().device(1).unwrap().stream().unwrap();
        let error = exchange(own, &other, &[], &[]).unwrap_err();
        assert!(matches!(error, Error::OtherDevice { what: "the communicator", got: 0, expected: 1 }), "{error}");
        all_to_all(own, stream, 9).map(drop)
    });
    results.into_iter().flatten().for_each(|result| result.unwrap());
}

#[test]
fn a_rank_beyond_the_size_is_an_error() {
    let Some((nccl, device)) = open() else { return };
    let id = UniqueId { bytes: [1; 128] };
    let error = Communicator::new(&nccl, device, &id, Rank { rank: 2, size: 2, local: 0 }, SHORT).unwrap_err();
    assert_eq!(error.to_string(), "ncclCommInitRankConfig returned 4: rank: got 2, expected below 2, the number of ranks");
}

#[test]
fn ranks_that_finish_wait_for_each_other() {
    let Some((nccl, device)) = open() else { return };
    let id = nccl.unique_id().unwrap();
    let join = |rank: usize, deadline: Duration| Communicator::new(&nccl, device, &id, Rank { rank, size: 2, local: 0 }, deadline).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(0, DEADLINE).finish());
        let second = scope.spawn(|| {
            let own = join(1, DEADLINE);
            std::thread::sleep(SHORT);
            own.finish()
        });
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
    });
    let id = nccl.unique_id().unwrap();
    let join = |rank: usize| Communicator::new(&nccl, device, &id, Rank { rank, size: 2, local: 0 }, SHORT).unwrap();
    std::thread::scope(|scope| {
        let alone = scope.spawn(|| join(0).finish());
        let other = scope.spawn(|| {
            let own = join(1);
            std::thread::sleep(3 * SHORT);
            drop(own);
        });
        assert!(matches!(alone.join().unwrap(), Err(Error::Timeout { what: "the other ranks to finish", .. })));
        other.join().unwrap();
    });
}
