//! Messages on the standard error stream, without locks and without allocation: a program whose memory fails may hold any.

use std::fmt::{Display, Write};

use arrayvec::ArrayString;

use crate::error::PageError;

/// Says why a thread is about to get SIGBUS.
pub(crate) fn failed(address: u64, error: &PageError) {
    print(format_args!("bluebridge: the memory at {address:#x} cannot be used: {error}\n"));
}

/// Says that a thread waits for a page.
pub(crate) fn waiting(page: u64, cause: &dyn Display) {
    print(format_args!("bluebridge: still waiting for page {page}: {cause}\n"));
}

/// Says why the process is about to end.
pub(crate) fn ended() {
    print(format_args!(
        "bluebridge: a thread of the pager panicked, so the program's memory is unusable\n"
    ));
}

fn print(message: std::fmt::Arguments<'_>) {
    let mut text = ArrayString::<1024>::new();
    // A text that is too long is cut.
    let _ = text.write_fmt(message);
    // Nobody could be told of an error.
    let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
}
