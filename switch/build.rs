//! Compiles the eBPF programs with clang; without clang the crate has no eBPF data plane.

fn main() {
    bluebridge_bpf::build::compile(
        "switch",
        "no eBPF data plane in this build (the soft data plane works)",
    );
}
