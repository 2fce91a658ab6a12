//! Whether a kernel answers READs at all.

use bluebridge_testkit::{namespace::in_thread, require_root};

use super::rig::Rig;
use crate::direct::{NoDirectReads, probe, program::classifier};

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

/// A server's start waits for the kernel to check the program; on emulated processors for seconds.
#[test]
fn a_kernel_checks_the_program_in_few_steps() {
    let mut rig = Rig::new("direct-steps");
    let program = classifier(&mut rig.program).expect("it is there");
    let info = program.info().expect("it is loaded");
    let steps = info.verified_instruction_count().expect("Linux 5.16");
    println!("the kernel checked the program in {steps} steps");
    assert!(steps < 50_000, "{steps}");
}
