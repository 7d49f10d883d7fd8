//! What the device may still be using when its last owner lets go of it: it waits here until everything that was submitted before has
//! passed. No capture is disturbed by it, whoever began it.

use crate::device::Device;
use crate::lane::passed;
use crate::stream::Event;
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;

/// Anything that is dropped later.
type Retired = Box<dyn Send>;

/// Things, each with what has to pass before it may go.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Vec<(Vec<Arc<Event>>, Retired)>>);

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Waiting({})", self.0.lock().len())
    }
}

impl Waiting {
    /// Puts something here that nothing uses any more, from where it must not be dropped.
    pub(crate) fn push(&self, retired: Retired) {
        self.0.lock().push((Vec::new(), retired));
    }
}

impl Device {
    /// Drops something once the device has passed everything that handles have marked and graphs have launched so far, on whichever
    /// stream, by whichever thread. Nothing waits, and captures go on.
    pub fn retire(&'static self, thing: Box<dyn Send>) {
        self.release_retired();
        let ends = self.lanes().ends();
        if ends.is_empty() {
            return self.relaxed(|| drop(thing));
        }
        self.waiting().0.lock().push((ends, thing));
    }

    /// Drops what was retired and the device has passed, and says how many things still wait. Retirements, captures and allocations of workspace do this
    /// too.
    pub fn release_retired(&'static self) -> usize {
        // Outside of the lock: dropping calls the driver, which may call back to leave something here.
        let waiting = std::mem::take(&mut *self.waiting().0.lock());
        if waiting.is_empty() {
            return 0;
        }
        let mut rest = Vec::new();
        self.relaxed(|| {
            for (mut ends, thing) in waiting {
                ends.retain(|end| !passed(end));
                if ends.is_empty() {
                    drop(thing);
                } else {
                    rest.push((ends, thing));
                }
            }
        });
        let mut all = self.waiting().0.lock();
        all.append(&mut rest);
        all.len()
    }
}
