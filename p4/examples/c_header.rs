//! Prints the declaration as a C header:
//! `cargo run -p bluebridge-p4 --example c_header > switch/bpf/declaration.h`.

fn main() {
    print!("{}", bluebridge_p4::c_header::c_header());
}
