//! Whether a kernel answers READs at all.

use bluebridge_testkit::{namespace::in_thread, require_root};

use crate::direct::{NoDirectReads, probe};

/// The virtual machines' tests read what this prints on older kernels.
#[test]
fn a_kernel_answers_or_says_what_it_lacks() {
    require_root();
    let missing = probe("no-such-interface").unwrap_err();
    assert!(matches!(missing, NoDirectReads::Attach(_)), "{missing}");
    match in_thread(|| probe("lo")) {
        Ok(()) => println!("the kernel answers READs"),
        Err(reason @ (NoDirectReads::Attach(_) | NoDirectReads::Kernel(_))) => println!("{reason}"),
        Err(other) => panic!("{other}"),
    }
}
