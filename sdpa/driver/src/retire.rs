//! Retired resources, which the device may still use when their last owner drops them. They wait until all work submitted before has ended. This
//! disturbs no capture, of this or of other code.

use crate::device::Device;
use crate::lane::passed;
use crate::stream::Event;
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;

/// A resource that is dropped later.
type Retired = Box<dyn Send>;

/// Retired resources of a device, each with the events that the device must pass before the resource is dropped.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Vec<(Vec<Arc<Event>>, Retired)>>);

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Waiting({})", self.0.lock().len())
    }
}

impl Waiting {
    /// Adds a resource that nothing uses any more, from code that must not drop the resource itself.
    pub(crate) fn push(&self, retired: Retired) {
        self.0.lock().push((Vec::new(), retired));
    }
}

impl Device {
    /// Drops a resource once the device has finished all work that handles have marked and graphs have launched so far, on any stream and
    /// by any thread. It returns without waiting, and does not disturb captures.
    pub fn retire(&'static self, thing: Box<dyn Send>) {
        self.release_retired();
        let ends = self.lanes().ends();
        if ends.is_empty() {
            return self.relaxed(|| drop(thing));
        }
        self.waiting().0.lock().push((ends, thing));
    }

    /// Drops all retired resources that the device no longer needs, and returns the number of retired resources that still wait.
    /// Retirements, captures and workspace allocations do this too.
    pub fn release_retired(&'static self) -> usize {
        // Drop the resources outside the lock: dropping calls the driver, which may call back and retire more.
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
