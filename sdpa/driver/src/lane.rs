//! Lanes: where the work ends that one handle, or one captured graph, has submitted. The end is an event that is recorded behind each
//! submission, while the stream is certainly there; recording takes about 0.1 µs (H200, driver 580). Nothing asks a stream later, which may
//! be captured by then, or gone, and nothing asks the whole context, which would invalidate every capture that runs in it.

use crate::device::{Device, Entered};
use crate::driver::Ptr;
use crate::error::Error;
use crate::stream::Event;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::sync::Arc;

/// Marks the end of what one submitter, a thread or a handle, has submitted so far. What [`Device::retire`] is given waits until every lane's end has
/// passed. Lanes live as long as the process, and go from one owner to the next.
#[derive(Debug, Default)]
pub struct Lane {
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

/// The lanes of a thread, a device each. They go back when it ends.
#[derive(Default)]
struct OfThread(Vec<(&'static Device, &'static Lane)>);

impl Drop for OfThread {
    fn drop(&mut self) {
        for (device, lane) in &self.0 {
            device.lanes().give_back(lane);
        }
    }
}

thread_local! {
    static LANES: RefCell<OfThread> = const { RefCell::new(OfThread(Vec::new())) };
}

/// This thread's lane of a device; none while the thread ends.
pub(crate) fn of_thread(device: &'static Device) -> Option<&'static Lane> {
    let found = LANES.try_with(|lanes| {
        let mut lanes = lanes.try_borrow_mut().ok()?;
        if let Some((_, lane)) = lanes.0.iter().find(|(of, _)| of.ordinal() == device.ordinal()) {
            return Some(*lane);
        }
        let lane = device.lanes().take();
        lanes.0.push((device, lane));
        Some(lane)
    });
    found.ok().flatten()
}

/// The lanes of a device.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    all: Mutex<Vec<&'static Lane>>,
    free: Mutex<Vec<&'static Lane>>,
}

impl Lanes {
    /// A lane that nobody has.
    pub(crate) fn take(&self) -> &'static Lane {
        if let Some(lane) = self.free.lock().pop() {
            return lane;
        }
        let lane: &'static Lane = Box::leak(Box::default());
        self.all.lock().push(lane);
        lane
    }

    /// Its ends are kept in mind.
    pub(crate) fn give_back(&self, lane: &'static Lane) {
        self.free.lock().push(lane);
    }

    /// The end of everything that was marked so far, as far as it is not known to have passed.
    pub(crate) fn ends(&self) -> Vec<Arc<Event>> {
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
pub(crate) fn passed(event: &Event) -> bool {
    matches!(event.passed(), Ok(true))
}

impl Lane {
    /// Marks the present end of a live stream that is not being captured, as the end of what was submitted on this lane.
    pub(crate) fn mark(&self, entered: &Entered<'_>, device: &'static Device, stream: Ptr, id: Option<u64>) -> Result<(), Error> {
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
