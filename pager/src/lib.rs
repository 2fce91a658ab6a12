//! Remote memory as plain memory: page faults that are resolved from a rack.
//!
//! A [`RemoteRegion`] is a range of addresses of which at most a given number of pages is local; the others are on
//! memory servers. A program uses it as a slice.
//!
//! ```no_run
//! use bluebridge::JoinOptions;
//! use bluebridge_pager::{RegionOptions, RemoteRegion};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = JoinOptions::from_env()?.join()?;
//! // 1 GiB, of which 64 MiB are local.
//! let mut region = RemoteRegion::new(&client, &RegionOptions::new(1 << 30, 64 << 20))?;
//! let memory = region.as_mut_slice();
//! memory[500_000_000] = 7;
//! assert_eq!(memory[500_000_000], 7);
//! # Ok(())
//! # }
//! ```

// `region` is the API. `pager` resolves a fault, `evict` makes room; both change pages through `page_table` and take
// room from `frames`. `fault` is who calls the pager. `replacement`, `prefetch` and `likelihood` decide, without I/O.
// `background` reads windows before a fault asks for them.
// `kernel` is what the system does, `remote` what memory servers do.
mod background;
mod counters;
mod error;
mod evict;
mod fault;
mod fork;
mod frames;
mod kernel;
mod lane;
mod likelihood;
mod options;
mod page_table;
mod pager;
mod prefetch;
mod region;
mod remote;
mod replacement;
mod report;

pub use counters::Statistics;
pub use error::{Error, EvictionFailure, PageError};
pub use fork::Forking;
pub use kernel::userfault::{FaultScope, UserfaultError, probe};
pub use options::{FaultMode, OnFailure, RegionOptions};
pub use region::{Mechanisms, Observer, Pinned, PinnedMut, RemoteRegion};
pub use remote::RemoteMemory;

/// Starts a thread of the pager. It gets no signals of the program.
///
/// If it panics, the process ends: other threads would wait for their pages for ever.
fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let _blocked = kernel::signal::Blocked::new();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let abort = AbortOnPanic;
        run();
        std::mem::forget(abort);
    })
}

/// Ends the process if it is dropped, which only a panic does.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        report::ended();
        std::process::abort();
    }
}
