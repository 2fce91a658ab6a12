//! The embedded switch on older kernels: its own tests, as they were built here, executed in machines.

use std::{path::Path, time::Duration};

use bluebridge_testkit::test_program;
use bluebridge_vm::{Kernel, Machine, MachineError};

use crate::installed;

/// The tests load and verify large programs, on an emulated processor.
const DEADLINE: Duration = Duration::from_secs(200);
/// For programs of 100 MB, of which the parts in use are cached.
const MEMORY_MIB: u32 = 1024;

/// Executes tests of `conformance/`, each by its whole name, and returns what they printed if all hold.
fn conformance(kernel: Kernel, tests: &[&str]) -> Result<String, MachineError> {
    execute(kernel, &test_program("bluebridge-conformance", "switches"), "conformance", tests)
}

/// Executes unit tests of `memserver/`.
fn memserver(kernel: Kernel, tests: &[&str]) -> Result<String, MachineError> {
    let program = test_program("bluebridge-memserver", "bluebridge_memserver");
    execute(kernel, &program, "memserver", tests)
}

fn execute(
    kernel: Kernel,
    program: &Path,
    directory: &str,
    tests: &[&str],
) -> Result<String, MachineError> {
    // One after another: the machine has one processor, and each has deadlines.
    let options = ["--include-ignored", "--test-threads=1", "--exact", "--nocapture"];
    let command = [program.to_str().expect("an ASCII path")];
    let command = command.iter().chain(&options).chain(tests).copied();
    let output = Machine::new(&installed(kernel), command)
        .directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(directory))
        .memory_mib(MEMORY_MIB)
        .deadline(DEADLINE)
        .run()?;
    println!("Linux {kernel}: {:.1} s", output.took.as_secs_f64());
    let text = output.success()?;
    assert!(text.contains(&format!("test result: ok. {} passed", tests.len())), "{text}");
    Ok(text)
}

#[test]
fn the_packet_vectors_hold_for_the_embedded_switch_on_linux_6_12() {
    let held = conformance(Kernel::V6_12, &["root::vectors_hold_for_the_embedded_switch"]);
    held.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn the_switch_in_the_kernel_and_in_the_driver_keeps_its_promises_on_linux_6_12() {
    let tests = [
        "contract::root::the_ebpf_switch_keeps_every_promise",
        "differential::root::both_planes_do_the_same_with_random_frames_and_tables",
        "traffic::root::datagrams_and_streams_pass_the_ebpf_switch_to_the_peer",
        "traffic::root::datagrams_and_streams_pass_the_xdp_switch",
    ];
    conformance(Kernel::V6_12, &tests).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn linux_6_1_has_the_soft_switch_but_not_the_one_in_the_kernel() {
    let soft = [
        "vectors_hold_for_the_soft_pipeline",
        "contract::root::the_soft_switch_keeps_every_promise",
    ];
    conformance(Kernel::V6_1, &soft).unwrap_or_else(|error| panic!("{error}"));
    let ebpf = ["contract::root::the_ebpf_switch_keeps_every_promise"];
    let refused =
        conformance(Kernel::V6_1, &ebpf).expect_err("if it works, correct docs/testing.md");
    let MachineError::CommandFailed { stdout, stderr, .. } = refused else { panic!("{refused}") };
    // The verifier does not conclude from `!= 0` that a length is at least 1.
    let reason = "invalid access to memory, mem_size=100 off=4 size=0";
    assert!(format!("{stdout}{stderr}").contains(reason), "{stdout}\n{stderr}");
}

/// What a kernel prints if READs can be answered there.
const ANSWERS: &str = "the kernel answers READs";

#[test]
fn linux_6_12_answers_reads_as_the_server_does() {
    let tests = [
        "direct::tests::root::kernels::a_kernel_answers_or_says_what_it_lacks",
        "direct::tests::root::kernels::a_kernel_checks_the_program_in_few_steps",
        "direct::tests::root::pages::what_the_kernel_answers_is_what_the_responder_answers",
        "direct::tests::root::lines::whole_pages_of_a_line_are_answered_as_the_responder_answers",
        "direct::tests::root::pages::a_sum_that_the_device_completes_stays_so",
        "direct::tests::root::pages::pages_that_may_not_be_read_are_for_the_server",
        "direct::tests::root::memory::a_map_outlives_its_process_and_is_dropped_with_its_file",
    ];
    let text = memserver(Kernel::V6_12, &tests).unwrap_or_else(|error| panic!("{error}"));
    assert!(text.contains(ANSWERS), "{text}");
}

#[test]
fn linux_6_1_says_why_it_answers_no_reads() {
    let tests = ["direct::tests::root::kernels::a_kernel_answers_or_says_what_it_lacks"];
    let text = memserver(Kernel::V6_1, &tests).unwrap_or_else(|error| panic!("{error}"));
    assert!(!text.contains(ANSWERS), "if it does, correct docs/direct-reads.md: {text}");
    assert!(text.contains("cannot attach programs that end with the process"), "{text}");
}
