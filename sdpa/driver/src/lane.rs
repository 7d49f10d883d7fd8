//! Lanes mark the end of work that one handle or one captured graph has submitted. The end is an event recorded after each submission, while the
//! stream is certainly alive; recording takes about 0.1 µs (H200, driver 580). Later the stream may be under capture or destroyed, so no later step
//! queries it. Querying the whole context would invalidate every capture in it.

use crate::device::{Device, Entered};
use crate::driver::Ptr;
use crate::error::Error;
use crate::stream::Event;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::sync::Arc;

/// Marks the end of the work that one submitter (a thread or a handle) has submitted so far, by an event on the stream. Resources passed
/// to [`Device::retire`] are freed only after the device has passed the marks of all lanes. Lanes live as long as the process, and later
/// submitters reuse them.
#[derive(Debug, Default)]
pub struct Lane {
    ends: Mutex<Ends>,
}

#[derive(Debug, Default)]
struct Ends {
    /// The number of the stream of the last submission.
    stream: Option<u64>,
    last: Option<Arc<Event>>,
    /// Ends on other streams that may not have passed yet.
    elsewhere: Vec<Arc<Event>>,
}

/// The lanes of a thread, one per device. They are given back when the thread ends.
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

/// Returns this thread's lane of a device; `None` while the thread ends.
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

/// The lanes of a device: those in use and those for reuse.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    all: Mutex<Vec<&'static Lane>>,
    free: Mutex<Vec<&'static Lane>>,
}

impl Lanes {
    /// Returns a lane that no submitter uses.
    pub(crate) fn take(&self) -> &'static Lane {
        if let Some(lane) = self.free.lock().pop() {
            return lane;
        }
        let lane: &'static Lane = Box::leak(Box::default());
        self.all.lock().push(lane);
        lane
    }

    /// Returns a lane for reuse by a later submitter. Retired resources still wait for the ends of work that the lane has marked.
    pub(crate) fn give_back(&self, lane: &'static Lane) {
        self.free.lock().push(lane);
    }

    /// Returns the events that mark the ends of submitted work on all lanes, without those that the device has certainly passed.
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

/// Returns whether the stream has certainly passed an event. An error counts as not passed: the context is then lost, and nothing may be
/// unloaded from it.
pub(crate) fn passed(event: &Event) -> bool {
    matches!(event.passed(), Ok(true))
}

impl Lane {
    /// Marks the current end of a live stream that is not under capture, as the end of the work submitted on this lane.
    pub(crate) fn mark(&self, entered: &Entered<'_>, device: &'static Device, stream: Ptr, id: Option<u64>) -> Result<(), Error> {
        let mut ends = self.ends.lock();
        // A stream without an ID may differ from the stream before, so treat it as another one.
        if id.is_none() || ends.stream != id {
            let Ends { last, elsewhere, .. } = &mut *ends;
            elsewhere.extend(last.take());
            elsewhere.retain(|end| !passed(end));
            ends.stream = id;
        }
        match &ends.last {
            // If another owner waits for this end, keep the event and record a new one.
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
