//! Compiles the eBPF programs with clang; without clang the crate has no eBPF data plane.

use std::{env, path::PathBuf, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rustc-check-cfg=cfg(ebpf_object)");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("switch.o");
    let result = Command::new(&clang)
        .args([
            "-O2",
            // BTF describes the maps; no path of this machine is in it.
            "-g",
            "-ffile-compilation-dir=.",
            "-target",
            "bpf",
            "-mcpu=v3",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fno-strict-aliasing",
            "-c",
        ])
        .args(["bpf/switch.bpf.c", "-o"])
        .arg(&out)
        .status();
    match result {
        Ok(status) if status.success() => println!("cargo:rustc-cfg=ebpf_object"),
        Ok(status) => panic!(
            "{clang} could not compile bpf/switch.bpf.c: {status}; use a clang with the target bpf, which the \
             variable CLANG can name"
        ),
        Err(error) => {
            println!(
                "cargo:warning=no eBPF data plane in this build: {clang}: {error}; install clang and build again, \
                 or use the soft data plane"
            );
            // Once clang is installed, the next build must find it: the installation changes one of these.
            let path = env::var_os("PATH").unwrap_or_default();
            for directory in env::split_paths(&path).filter(|directory| directory.is_dir()) {
                println!("cargo:rerun-if-changed={}", directory.display());
            }
        }
    }
}
