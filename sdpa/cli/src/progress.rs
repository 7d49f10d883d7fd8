//! Progress on stderr, if it is a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// A setting: whether commands show their progress on stderr.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    shown: bool,
}

impl Progress {
    /// Creates a progress display. It is shown on a terminal only, and never with JSON output.
    pub(crate) fn new(json: bool) -> Progress {
        Progress { shown: !json && std::io::stderr().is_terminal() }
    }

    /// Starts a step of unknown length, with a spinner.
    pub(crate) fn spinner(self, what: &'static str) -> Step {
        let bar = if self.shown { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
        bar.set_message(what);
        if self.shown {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Step(bar)
    }

    /// Starts a step of `length` units, with a progress bar.
    pub(crate) fn bar(self, what: &'static str, length: u64) -> Step {
        let bar = if self.shown { ProgressBar::new(length) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}% {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        Step(bar)
    }
}

/// A step in progress; its display disappears when it is dropped.
#[derive(Debug)]
pub(crate) struct Step(ProgressBar);

impl Step {
    /// Returns a step without a display.
    pub(crate) fn hidden() -> Step {
        Step(ProgressBar::hidden())
    }

    /// Replaces the text before a bar.
    pub(crate) fn message(&self, text: String) {
        self.0.set_message(text);
    }

    pub(crate) fn advance(&self, by: u64) {
        self.0.inc(by);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
