//! Compiles an eBPF program, for build scripts.

use std::{env, path::PathBuf, process::Command};

/// Compiles `bpf/NAME.bpf.c` of the calling crate to `NAME.o` in its `OUT_DIR`, and sets `cfg(ebpf_object)`.
/// Without clang, the crate is built without the program, and `without` says what it lacks then.
///
/// # Panics
/// If clang cannot compile the program.
pub fn compile(name: &str, without: &str) {
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rustc-check-cfg=cfg(ebpf_object)");
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    println!("cargo:rerun-if-changed={include}");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join(format!("{name}.o"));
    let source = format!("bpf/{name}.bpf.c");
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
            "-I",
            include,
            "-c",
        ])
        .arg(&source)
        .arg("-o")
        .arg(&out)
        .status();
    match result {
        Ok(status) if status.success() => println!("cargo:rustc-cfg=ebpf_object"),
        Ok(status) => panic!(
            "{clang} could not compile {source}: {status}; use a clang with the target bpf, which the variable CLANG \
             can name"
        ),
        Err(error) => {
            println!("cargo:warning={without}: {clang}: {error}; install clang and build again");
            // Once clang is installed, the next build must find it: the installation changes one of these.
            let path = env::var_os("PATH").unwrap_or_default();
            for directory in env::split_paths(&path).filter(|directory| directory.is_dir()) {
                println!("cargo:rerun-if-changed={}", directory.display());
            }
        }
    }
}
