//! A daemon whose first thread has ended while another one still listens; every killed daemon is briefly in this
//! state. `/proc` shows it as a zombie. It listens at the address in its argument.

use std::net::TcpListener;
use std::{env, thread};

fn main() {
    let address = env::args().nth(1).expect("an address");
    let listener = TcpListener::bind(address).expect("the address is free");
    thread::spawn(move || {
        let _listener = listener;
        loop {
            thread::park();
        }
    });
    // SAFETY: it ends the calling thread only, which owns nothing that the other one uses.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}
