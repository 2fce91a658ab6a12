//! Tests in virtual machines: what could end the kernel that executes it, and other kernels than this machine's.

mod disk;
mod kernels;
mod machines;
mod racks;
mod rdma;
mod swap;

use bluebridge_vm::{Cache, Installed, Kernel};

/// What `cargo xtask test` fetched for machines with this kernel.
#[track_caller]
fn installed(kernel: Kernel) -> Installed {
    let cache = Cache::of_this_build().expect("a test knows its file");
    cache.installed(kernel).unwrap_or_else(|error| {
        panic!("{error}; or leave the tier out: `cargo xtask test --without vm`")
    })
}
