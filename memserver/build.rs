//! Compiles the eBPF program with clang; without clang the kernel answers no READs.

fn main() {
    bluebridge_bpf::build::compile(
        "read",
        "the kernel will answer no READs of memory servers of this build",
    );
}
