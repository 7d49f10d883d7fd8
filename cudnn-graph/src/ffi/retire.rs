//! What the device may still be using when its last owner lets go of it: it waits here until everything that was submitted before
//! has passed.

use super::driver::{Device, Event};
use parking_lot::Mutex;
use std::fmt;

/// Anything that is dropped later.
type Thing = Box<dyn Send>;

/// When something may be dropped.
enum When {
    /// Now.
    Now,
    /// Behind this event.
    After(Event),
    /// Not known yet: the device would not take an event, as while a stream is captured.
    Later,
}

/// What waits, of one device.
#[derive(Default)]
pub(super) struct Yard {
    waiting: Mutex<Vec<(When, Thing)>>,
}

impl fmt::Debug for Yard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Yard({})", self.waiting.lock().len())
    }
}

impl Yard {
    /// Puts something here that nothing uses any more, from where it must not be dropped.
    pub(super) fn leave(&self, thing: Thing) {
        self.waiting.lock().push((When::Now, thing));
    }
}

impl Device {
    /// Drops something once the device has passed everything that has been submitted to it so far, on whichever stream, by whichever
    /// thread. Waits only where the driver is older than CUDA 12.5, which cannot mark the end of all streams.
    pub fn retire(&'static self, thing: Box<dyn Send>) {
        let when = self.end_of_all();
        self.yard().waiting.lock().push((when, thing));
        self.reap();
    }

    /// Drops what was retired and has been passed; how many things still wait. Each retirement does this too.
    pub fn reap(&'static self) -> usize {
        // Outside of the lock: dropping calls the driver, which may call back to leave something here.
        let waiting = std::mem::take(&mut *self.yard().waiting.lock());
        let mut rest = Vec::new();
        self.relaxed(|| {
            for (when, thing) in waiting {
                match self.now(when) {
                    When::Now => drop(thing),
                    when @ (When::After(_) | When::Later) => rest.push((when, thing)),
                }
            }
        });
        let mut all = self.yard().waiting.lock();
        all.append(&mut rest);
        all.len()
    }

    fn now(&'static self, when: When) -> When {
        match when {
            When::Now => When::Now,
            When::After(event) => match event.passed() {
                Ok(true) => When::Now,
                // After an error the context is lost: nothing may be unloaded from it.
                Ok(false) | Err(_) => When::After(event),
            },
            When::Later => match self.end_of_all() {
                When::After(event) => self.now(When::After(event)),
                other @ (When::Now | When::Later) => other,
            },
        }
    }

    fn end_of_all(&'static self) -> When {
        match self.record_all() {
            Some(Ok(event)) => When::After(event),
            Some(Err(_)) => When::Later,
            None => match self.synchronize() {
                Ok(()) => When::Now,
                Err(_) => When::Later,
            },
        }
    }
}
