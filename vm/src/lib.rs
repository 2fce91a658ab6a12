//! Virtual machines for tests: a crash of the kernel costs a machine, not the run.
//!
//! [`Cache`] fetches qemu and a kernel below the target directory; nothing is installed on the host.
//! A [`Machine`] boots that kernel on the host's own files, read-only below an overlay in memory, so that it
//! sees everything that was built here. It executes one command, and [`Machine::run`] returns what the
//! command printed and how it ended. [`run_together`] does the same for machines that need each other.
//!
//! * `packages`: what is fetched, and how; `cache`: where it is, and whether it is complete.
//! * `kernel`: the kernel in a compressed image.
//! * `image`: the initramfs; `init.sh` and `guest.sh`: what the machine executes before and around the command.
//! * `machine`: the description of a machine; `qemu`: its command line; `run`: its process and its end.

mod cache;
mod image;
mod kernel;
mod machine;
mod packages;
mod program;
mod qemu;
mod run;

pub use cache::{Cache, CacheError, Installed};
pub use machine::{DEADLINE, Kernel, Link, Machine, UnknownKernel};
pub use packages::PackageError;
pub use run::{MachineError, Output, run_together};
