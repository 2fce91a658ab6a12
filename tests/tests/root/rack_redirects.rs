//! Redirects with real packets: a contended lease causes an entry in the switch's table, and its end
//! removes the entry, also when there is no controller any more.

use std::time::{Duration, Instant};

use bluebridge::{Error, Pointer, UpdateOptions};
use bluebridge_rack::control::tables::{Act, TableLine};
use bluebridge_rack::spec::{DataPlane, Redirects};
use bluebridge_testkit::until;
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient};
use bluebridge_tests::rack::{RackOptions, TestRack};

/// Long enough that a lease is still held when its redirect is installed, also on a busy machine.
const LONG: Duration = Duration::from_secs(9);

/// Requests a page that client 1 has until the switch redirects the requests to client 1.
fn contend(rack: &TestRack, client: &mut UdpClient, page: Pointer) {
    until("a redirect", || {
        match client.try_update(page, &mut [0; 8]) {
            Err(Error::Busy { .. }) => {}
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("two have the page"),
        }
        rack.is_redirected(page, 1)
    });
}

fn leases_redirect(name: &str, switch: DataPlane) {
    let options = RackOptions { servers: 1, ..RackOptions::new(switch, "9000") };
    let mut rack = TestRack::up(name, &options);
    let (one, two) = (Endpoint::join(&rack, 1), Endpoint::join(&rack, 2));
    let mut owner = one.client(&rack, 1);
    let mut rival = two.client(&rack, 2);
    let page = owner.create(4096).expect("there is memory").base();
    let for_a_while = |lease| UpdateOptions { lease: Some(lease), ..UpdateOptions::default() };

    let mut bytes = [0; 8];
    let mut update = owner.update_with(page, &mut bytes, for_a_while(LONG)).expect("granted");
    contend(&rack, &mut rival, page);
    assert_eq!(rack.redirects().len(), 1);
    // The switch has it before the controller has the confirmation.
    until("the controller counts one lease and its redirect", || {
        let leases = rack.switch_status().leases.expect("a status");
        (leases.known_count, leases.redirect_count) == (1, 1)
    });
    update.copy_from_slice(b"far away");
    update.commit().expect("it is still held");
    until("no redirect after the COMMIT", || rack.redirects().is_empty());
    let mut read = [0; 8];
    rival.read(page, &mut read).expect("it is free");
    assert_eq!(&read, b"far away");

    // Now the controller dies while a redirect is installed.
    let asked = Instant::now();
    let lease = Duration::from_secs(6);
    let update = owner.update_with(page, &mut bytes, for_a_while(lease)).expect("granted");
    contend(&rack, &mut rival, page);
    rack.kill("controller");
    if switch == DataPlane::Bmv2 {
        // A P4 program has no clock for entries. The redirect stays, and the former owner sends requests to the home.
        drop(update);
        rival.read(page, &mut read).expect("the home serves it");
        assert_eq!(rack.redirects().len(), 1, "no controller can delete it");
        rack.start("controller");
        return until_empty(&rack);
    }
    // An OpenFlow switch removes it by itself, the embedded one keeps it.
    let is_removed = switch == DataPlane::Ovs;
    until("its expiry in the switch itself", || {
        let ended = |it: &TableLine| matches!(it.action, Act::Redirect { lease_ms: 0, .. });
        let redirects = rack.redirects();
        if is_removed { redirects.is_empty() } else { redirects.iter().all(ended) }
    });
    assert!(asked.elapsed() > lease - Duration::from_secs(1), "not before its time");
    let hits = rack.redirects();
    assert_eq!(hits.len(), usize::from(!is_removed), "no controller can delete it");
    drop(update);
    rival.read(page, &mut read).expect("its lease is over");
    assert_eq!(rack.redirects(), hits, "an expired redirect matches no request");
    rack.start("controller");
    until_empty(&rack);
}

fn until_empty(rack: &TestRack) {
    until("the entries of the previous controller are removed", || rack.redirects().is_empty());
}

#[test]
fn a_contended_lease_is_redirected_by_the_soft_switch_until_it_ends() {
    leases_redirect("redir-soft", DataPlane::Soft);
}

#[test]
fn a_contended_lease_is_redirected_by_the_ebpf_switch_until_it_ends() {
    leases_redirect("redir-ebpf", DataPlane::Ebpf);
}

#[test]
fn a_contended_lease_is_redirected_by_open_vswitch_until_it_ends() {
    leases_redirect("redir-ovs", DataPlane::Ovs);
}

#[test]
#[ignore = "BMv2 must be built first, see docs/switches.md"]
fn a_contended_lease_is_redirected_by_bmv2_until_the_controller_ends_it() {
    leases_redirect("redir-bmv2", DataPlane::Bmv2);
}

#[test]
fn every_lease_is_redirected_or_none_as_configured() {
    for (policy, count) in [(Redirects::Always, 1), (Redirects::Off, 0)] {
        let options = RackOptions {
            servers: 1,
            redirects: policy,
            ..RackOptions::new(DataPlane::Soft, "9000")
        };
        let rack = TestRack::up("redir-policy", &options);
        let (one, two) = (Endpoint::join(&rack, 1), Endpoint::join(&rack, 2));
        let mut owner = one.client(&rack, 1);
        let mut rival = two.client(&rack, 2);
        let page = rival.create(4096).expect("there is memory").base();
        let mut bytes = [0; 8];
        let options = UpdateOptions { lease: Some(LONG), ..UpdateOptions::default() };
        let update = owner.update_with(page, &mut bytes, options).expect("granted");
        if count == 0 {
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(200) {
                let mut bytes = [0; 8];
                let is_busy = matches!(rival.try_update(page, &mut bytes), Err(Error::Busy { .. }));
                assert!(is_busy);
            }
        } else {
            until("a redirect", || rack.is_redirected(page, 1));
        }
        assert_eq!(rack.redirects().len(), count, "{policy:?}");
        update.abort().expect("it is held");
        until("no redirect", || rack.redirects().is_empty());
    }
}
