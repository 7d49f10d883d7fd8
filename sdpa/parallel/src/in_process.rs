//! Ranks as threads of one process.

use crate::exchange::{Exchange, ExchangeError, Incoming, Outgoing};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A rank of a group of threads, for tests and for machines without a network. Messages are copied.
///
/// A rank that is dropped leaves the group, also if its thread panics; ranks that wait for it receive [`ExchangeError::Gone`].
#[derive(Debug)]
pub struct InProcess {
    rank: usize,
    size: usize,
    deadline: Duration,
    group: Arc<Group>,
}

#[derive(Debug, Default)]
struct Group {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Messages from one rank to another that are not yet received.
    messages: HashMap<[usize; 2], VecDeque<Vec<u8>>>,
    gone: Vec<usize>,
    failed: Option<(usize, String)>,
}

impl InProcess {
    /// Creates the ranks of a group. Each belongs to one thread. An exchange fails after `deadline`.
    ///
    /// ```
    /// use sdpa_parallel::{Exchange, InProcess, Incoming, Outgoing};
    /// use std::time::Duration;
    ///
    /// let ranks = InProcess::group(2, Duration::from_secs(5));
    /// let sums: Vec<u8> = std::thread::scope(|scope| {
    ///     let run = |mut rank: InProcess| {
    ///         let (peer, mut received) = (1 - rank.rank(), [0u8]);
    ///         let sent = [rank.rank() as u8 + 1];
    ///         rank.exchange(&[Outgoing { peer, bytes: &sent }], &mut [Incoming { peer, bytes: &mut received }]).unwrap();
    ///         sent[0] * 10 + received[0]
    ///     };
    ///     let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
    ///     threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    /// });
    /// assert_eq!(sums, [12, 21]);
    /// ```
    pub fn group(size: usize, deadline: Duration) -> Vec<InProcess> {
        let group = Arc::new(Group::default());
        (0..size).map(|rank| InProcess { rank, size, deadline, group: group.clone() }).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked may have held the lock, but no step between changes of the state can panic.
        self.group.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exchange for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn exchange(&mut self, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<(), ExchangeError> {
        let peers = sends.iter().map(|send| send.peer).chain(receives.iter().map(|receive| receive.peer));
        if let Some(peer) = peers.into_iter().find(|peer| *peer >= self.size || *peer == self.rank) {
            return Err(ExchangeError::Peer { peer, size: self.size });
        }
        let mut state = self.state();
        for send in sends {
            state.messages.entry([self.rank, send.peer]).or_default().push_back(send.bytes.to_vec());
        }
        self.group.changed.notify_all();
        let until = Instant::now() + self.deadline;
        for receive in receives {
            let peer = receive.peer;
            let message = loop {
                if let Some((peer, reason)) = state.failed.clone() {
                    return Err(ExchangeError::Failed { peer, reason });
                }
                if let Some(message) = state.messages.get_mut(&[peer, self.rank]).and_then(VecDeque::pop_front) {
                    break message;
                }
                if state.gone.contains(&peer) {
                    return Err(ExchangeError::Gone { peer });
                }
                let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                    return Err(ExchangeError::Timeout { peer, after: self.deadline });
                };
                state = self.group.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            };
            if message.len() != receive.bytes.len() {
                return Err(ExchangeError::Length { peer, got: message.len(), expected: receive.bytes.len() });
            }
            receive.bytes.copy_from_slice(&message);
        }
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.rank;
        self.state().failed.get_or_insert_with(|| (rank, reason.to_owned()));
        self.group.changed.notify_all();
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let rank = self.rank;
        self.state().gone.push(rank);
        self.group.changed.notify_all();
    }
}
