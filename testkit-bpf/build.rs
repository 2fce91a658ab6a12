//! Compiles the eBPF program with clang.

fn main() {
    // Its declarations are those of the program under test.
    println!("cargo:rerun-if-changed=../memserver/bpf/shared.h");
    bluebridge_bpf::build::compile("change", "the tests of READs whose page changes will fail");
}
