//! cuDNN's log during the search for engines. If heuristics return an empty list, the last-error text is empty too, and only the log has the reasons.
//!
//! The callback is set once, when the library is loaded. It keeps messages only while a thread listens.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};

/// The type of the callback. The third argument describes the call and is not read.
pub(super) type Callback = unsafe extern "C" fn(i32, *mut c_void, *const c_void, *const c_char);
/// `cudnnSetCallback`.
pub(super) type SetCallback = unsafe extern "C" fn(u32, *mut c_void, Option<Callback>) -> i32;

/// The mask for errors and warnings.
pub(super) const MASK: u32 = (1 << 1) | (1 << 2);

thread_local! {
    static HEARD: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Records a message if this thread listens.
pub(super) unsafe extern "C" fn hear(_severity: i32, _user: *mut c_void, _debug: *const c_void, message: *const c_char) {
    if message.is_null() {
        return;
    }
    // `try_with` fails on a thread that is ending, and `try_borrow_mut` while another message is being handled. Drop the message in both
    // cases.
    let _ = HEARD.try_with(|heard| {
        if let Ok(mut heard) = heard.try_borrow_mut()
            && let Some(lines) = heard.as_mut()
        {
            let mut line = message;
            loop {
                // SAFETY: cuDNN passes zero-terminated lines followed by an empty one, which live during the call.
                let text = unsafe { CStr::from_ptr(line) };
                if text.is_empty() {
                    break;
                }
                lines.push(text.to_string_lossy().into_owned());
                // SAFETY: only an empty line is the last one, so another line follows this one.
                line = unsafe { line.add(text.count_bytes() + 1) };
            }
        }
    });
}

/// Calls `run`, and returns its result with the messages that cuDNN logged on this thread during the call.
pub(crate) fn listen<T>(run: impl FnOnce() -> T) -> (T, Vec<String>) {
    HEARD.with(|heard| *heard.borrow_mut() = Some(Vec::new()));
    let result = run();
    let lines = HEARD.with(|heard| heard.borrow_mut().take()).unwrap_or_default();
    (result, lines)
}

/// Messages that say nothing about the graph: other engines are for other graphs and devices.
const EMPTY: [&str; 5] = [
    "redirecting to",
    "is supported for this engine",
    "was not given to the engine",
    "does not support this graph pattern",
    "knob must be set",
];

/// Returns the distinct reasons in cuDNN's log messages, the most exact one first. Leaves out source code of the library and
/// uninformative messages.
pub(crate) fn reasons(lines: &[String]) -> Vec<String> {
    let mut reasons: Vec<String> = Vec::new();
    for line in lines {
        let Some((_, reason)) = line.split_once("Reason: ") else { continue };
        let words = reason.split(" at: ").next().unwrap_or(reason).trim();
        let is_code = !words.contains(' ') || ["==", "!=", "(", "->"].iter().any(|sign| words.contains(sign));
        if !is_code && !EMPTY.iter().any(|empty| words.contains(empty)) && !reasons.iter().any(|r| r == words) {
            reasons.push(words.to_owned());
        }
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_words_and_each_is_told_once() {
        let lines = [
            "w!     Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()",
            "w!     Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: heads must be even at: heads % 2 != 0",
            "w!     Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: heads must be even at: elsewhere",
            "w!     Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: only Hopper is supported for this engine at: arch",
            "w!     Time: now",
        ];
        assert_eq!(reasons(&lines.map(str::to_owned)), ["heads must be even"]);
    }

    #[test]
    fn only_a_thread_that_listens_hears() {
        let say = |text: &[u8]| {
            // SAFETY: the lines are zero-terminated and followed by an empty one.
            unsafe { hear(2, std::ptr::null_mut(), std::ptr::null(), text.as_ptr().cast()) };
        };
        say(b"before\0\0");
        let ((), heard) = listen(|| say(b"one\0two\0\0"));
        say(b"after\0\0");
        assert_eq!(heard, ["one", "two"]);
    }
}
