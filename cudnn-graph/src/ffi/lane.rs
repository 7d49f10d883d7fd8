//! Lanes: where the work ends that one handle, or one captured graph, has submitted. The end is an event that is recorded behind each
//! submission, while the stream is certainly there; recording takes about 0.1 µs (H200, driver 580). Nothing asks a stream later, which may
//! be captured by then, or gone, and nothing asks the whole context, which would invalidate every capture that runs in it.

use super::device::{Device, Entered};
use super::driver::Ptr;
use super::stream::Event;
use crate::error::Error;
use parking_lot::Mutex;
use std::sync::Arc;

/// The end of what was submitted by one submitter at a time. Lanes live as long as the process; they are given from one to the next.
#[derive(Debug, Default)]
pub(super) struct Lane {
    ends: Mutex<Ends>,
}

#[derive(Debug, Default)]
struct Ends {
    /// The stream of the last submission, by its number.
    stream: Option<u64>,
    last: Option<Arc<Event>>,
    /// Ends on other streams, not known to have passed.
    elsewhere: Vec<Arc<Event>>,
}

/// The lanes of a device.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    all: Mutex<Vec<&'static Lane>>,
    free: Mutex<Vec<&'static Lane>>,
}

impl Lanes {
    /// A lane that nobody has.
    pub(super) fn take(&self) -> &'static Lane {
        if let Some(lane) = self.free.lock().pop() {
            return lane;
        }
        let lane: &'static Lane = Box::leak(Box::default());
        self.all.lock().push(lane);
        lane
    }

    /// Its ends are kept in mind.
    pub(super) fn give_back(&self, lane: &'static Lane) {
        self.free.lock().push(lane);
    }

    /// The end of everything that was marked so far, as far as it is not known to have passed.
    pub(super) fn ends(&self) -> Vec<Arc<Event>> {
        let lanes = self.all.lock().clone();
        let mut ends = Vec::new();
        for lane in lanes {
            let of = lane.ends.lock();
            ends.extend(of.last.iter().chain(&of.elsewhere).cloned());
        }
        ends.retain(|end| !passed(end));
        ends
    }
}

/// Whether a stream has certainly passed an event: after an error the context is lost, and nothing may be unloaded from it.
pub(super) fn passed(event: &Event) -> bool {
    matches!(event.passed(), Ok(true))
}

impl Lane {
    /// Marks the present end of a live stream that is not being captured, as the end of what was submitted on this lane.
    pub(super) fn mark(&self, entered: &Entered<'_>, device: &'static Device, stream: Ptr, id: Option<u64>) -> Result<(), Error> {
        let mut ends = self.ends.lock();
        // Of streams that have no numbers, every one may be another.
        if id.is_none() || ends.stream != id {
            let Ends { last, elsewhere, .. } = &mut *ends;
            elsewhere.extend(last.take());
            elsewhere.retain(|end| !passed(end));
            ends.stream = id;
        }
        match &ends.last {
            // Whoever waits for an end waits for that one, not for later ones.
            Some(last) if Arc::strong_count(last) == 1 => last.record(entered, stream),
            Some(_) | None => {
                let event = Event::new(device, false)?;
                event.record(entered, stream)?;
                ends.last = Some(Arc::new(event));
                Ok(())
            }
        }
    }
}
