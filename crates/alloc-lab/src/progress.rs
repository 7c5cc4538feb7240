//! Progress bars on the standard error, only where a person is looking.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Operations between two updates of a bar, so that it costs nothing per operation.
const STRIDE: u64 = 1024;

/// A bar that shows how far long work is. Invisible unless the standard error is a terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    pending: u64,
}

impl Progress {
    /// A bar for `total` steps, with `what` in front of it.
    pub fn new(total: u64, what: impl Into<String>) -> Self {
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let style = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} % {eta:>4}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what.into());
        Progress { bar, pending: 0 }
    }

    /// One step is done.
    pub fn tick(&mut self) {
        self.pending += 1;
        if self.pending == STRIDE {
            self.bar.inc(STRIDE);
            self.pending = 0;
        }
    }

    /// `done` of the steps are done now; for work whose steps are few and long.
    pub fn set(&self, done: u64, what: impl Into<String>) {
        self.bar.set_message(what.into());
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
