//! What the crates with eBPF programs share.
//!
//! * [`build`]: compiles a program with clang, for build scripts.
//! * [`fs`]: the BPF file system, where maps and links outlive the processes that made them.
//! * `include/kernel.h`: the part of the kernel's interface that the programs use.

#![forbid(unsafe_code)]

pub mod build;
pub mod fs;
