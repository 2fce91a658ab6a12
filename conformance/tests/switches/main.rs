//! The packet vectors on every switch, and tests of the embedded data planes beyond them.
//!
//! * `embedded`: the data planes of the embedded switch; `open_vswitch` and `bmv2`: other switches.
//! * `contract`: what an embedded data plane promises; `differential`: random frames; `traffic`: real sockets.

mod bmv2;
mod contract;
mod differential;
mod embedded;
mod open_vswitch;
mod traffic;

use bluebridge_conformance::{report, run_all};
use embedded::SoftPipeline;

#[test]
fn vectors_hold_for_the_soft_pipeline() {
    report(&[run_all("pipeline", &mut SoftPipeline::new())]);
}

mod root {
    use bluebridge_conformance::{Results, report, run_all};
    use bluebridge_switch::ebpf::PortMode;
    use bluebridge_testkit::namespace::in_thread;

    use crate::bmv2::Bmv2;
    use crate::embedded::{EbpfLinks, EbpfTestRun, SoftLinks};
    use crate::open_vswitch::Ovs;

    type Run = fn() -> Results;

    /// What needs only a kernel.
    const EMBEDDED: [Run; 4] = [
        || run_all("soft", &mut SoftLinks::new()),
        || run_all("test run", &mut EbpfTestRun::new("vectors-run")),
        || run_all("ebpf", &mut EbpfLinks::new("vectors-links", None)),
        || run_all("xdp", &mut EbpfLinks::new("vectors-xdp", Some(PortMode::Xdp))),
    ];

    /// The switches that every test machine has.
    fn switches() -> impl Iterator<Item = Run> {
        let open_vswitch: Run = || run_all("ovs", &mut Ovs::new());
        EMBEDDED.into_iter().chain([open_vswitch])
    }

    /// Runs the vectors on switches at the same time, each in a network namespace of its own.
    fn compare(switches: impl IntoIterator<Item = Run>) {
        let run = |switch: Run| std::thread::spawn(move || in_thread(switch));
        let running: Vec<_> = switches.into_iter().map(run).collect();
        let results = running.into_iter().map(|switch| switch.join().expect("it says why"));
        report(&results.collect::<Vec<_>>());
    }

    #[test]
    fn vectors_hold_for_every_switch() {
        compare(switches());
    }

    #[test]
    #[ignore = "part of the test above; virtual machines with other kernels run it (tests/tests/vm/kernels.rs)"]
    fn vectors_hold_for_the_embedded_switch() {
        compare(EMBEDDED);
    }

    #[test]
    #[ignore = "BMv2 must be built first, see docs/switches.md"]
    fn vectors_hold_for_every_switch_and_bmv2() {
        let bmv2: Run = || run_all("bmv2", &mut Bmv2::new());
        compare(switches().chain([bmv2]));
    }
}
