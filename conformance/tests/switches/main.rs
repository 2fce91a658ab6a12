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

use bluebridge_conformance::run_all;
use embedded::SoftPipeline;

#[test]
fn vectors_hold_for_the_soft_pipeline() {
    run_all("pipeline", &mut SoftPipeline::new());
}

mod root {
    use bluebridge_conformance::run_all;
    use bluebridge_switch::ebpf::PortMode;
    use bluebridge_testkit::namespace::in_thread;

    use crate::embedded::{EbpfLinks, EbpfTestRun, SoftLinks};

    #[test]
    fn vectors_hold_for_the_ebpf_program() {
        in_thread(|| run_all("test run", &mut EbpfTestRun::new("vectors-run")));
    }

    #[test]
    fn vectors_hold_for_the_ebpf_switch_over_links() {
        in_thread(|| run_all("ebpf", &mut EbpfLinks::new("vectors-links", None)));
    }

    #[test]
    fn vectors_hold_for_the_xdp_switch_over_links() {
        let mode = PortMode::Xdp;
        in_thread(move || run_all("xdp", &mut EbpfLinks::new("vectors-xdp", Some(mode))));
    }

    #[test]
    fn vectors_hold_for_the_soft_switch_over_links() {
        in_thread(|| run_all("soft", &mut SoftLinks::new()));
    }
}
