//! Redirects with real packets: from a lease that is fought over to the switch's table and out of it
//! again, also when there is no controller any more.

use std::time::{Duration, Instant};

use bluebridge::{Error, Pointer, UpdateOptions};
use bluebridge_cli::control::tables;
use bluebridge_cli::rack::daemon::DEVICE_ID;
use bluebridge_cli::rack::layout::P4RUNTIME;
use bluebridge_cli::rack::spec::{DataPlane, Node, Redirects};
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient};
use bluebridge_tests::rack::{TestRack, Wish};

/// How soon a redirect comes or goes at the latest; a home tells of a fight every 50 ms.
const SOON: Duration = Duration::from_secs(2);

fn until(what: &str, patience: Duration, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < patience, "{what}: not after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What the switch does with redirected pages, and how many packets it redirected.
fn redirects(rack: &TestRack) -> Vec<(String, u64)> {
    let names = tables::PortNames::new();
    let lines = rack.enter(Node::Switch, || tables::read(P4RUNTIME.into(), DEVICE_ID, &names));
    let lines = lines.unwrap_or_else(|error| panic!("{error}")).into_iter();
    lines.filter(|line| line.table == "redirect").map(|line| (line.action, line.packets)).collect()
}

/// Asks for a page that another has until the switch redirects it.
fn contend(rack: &TestRack, client: &mut UdpClient, page: Pointer) {
    until("a redirect", SOON, || {
        match client.try_update(page, &mut [0; 8]) {
            Err(Error::Busy { .. }) => {}
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("two have the page"),
        }
        !redirects(rack).is_empty()
    });
}

fn leases_redirect(name: &str, switch: DataPlane) {
    let wish = Wish { servers: 1, ..Wish::new(switch, "9000") };
    let mut rack = TestRack::up(name, &wish);
    let (one, two) = (Endpoint::join(&rack, 1), Endpoint::join(&rack, 2));
    let mut owner = one.client(&rack, 1);
    let mut rival = two.client(&rack, 2);
    let page = owner.create(4096).expect("there is memory").base();
    let way = format!("to port {} for ", rack.port(Node::Client(1)));
    let for_a_while = |lease| UpdateOptions { lease: Some(lease), ..UpdateOptions::default() };

    let mut bytes = [0; 8];
    let mut update =
        owner.update_with(page, &mut bytes, for_a_while(Duration::from_secs(8))).expect("granted");
    contend(&rack, &mut rival, page);
    let found = redirects(&rack);
    assert!(found.len() == 1 && found[0].0.starts_with(&way), "{found:?}");
    let leases = rack.controller_status().leases.expect("a status");
    assert_eq!((leases.known_count, leases.redirect_count), (1, 1), "{leases:?}");
    update.copy_from_slice(b"far away");
    update.commit().expect("it is still held");
    until("no redirect after the COMMIT", SOON, || redirects(&rack).is_empty());
    let mut read = [0; 8];
    rival.read(page, &mut read).expect("it is free");
    assert_eq!(&read, b"far away");

    // Now the controller dies while a redirect is there.
    let update =
        owner.update_with(page, &mut bytes, for_a_while(Duration::from_secs(3))).expect("granted");
    let granted = Instant::now();
    contend(&rack, &mut rival, page);
    rack.kill("controller");
    until("its end, in the switch itself", Duration::from_secs(4), || {
        redirects(&rack).iter().all(|(action, _)| action.ends_with(" for 0 ms more"))
    });
    assert!(granted.elapsed() > Duration::from_secs(2), "not before its time");
    let hits = redirects(&rack);
    assert_eq!(hits.len(), 1, "nobody is there to delete it");
    drop(update);
    rival.read(page, &mut read).expect("its lease is over");
    assert_eq!(redirects(&rack), hits, "what is over is not hit");
    rack.start("controller");
    until("what another controller left is gone", SOON, || redirects(&rack).is_empty());
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
fn every_lease_is_redirected_when_told_and_none_when_told() {
    for (policy, count) in [(Redirects::Always, 1), (Redirects::Off, 0)] {
        let wish = Wish { servers: 1, redirects: policy, ..Wish::new(DataPlane::Soft, "9000") };
        let rack = TestRack::up("redir-policy", &wish);
        let (one, two) = (Endpoint::join(&rack, 1), Endpoint::join(&rack, 2));
        let mut owner = one.client(&rack, 1);
        let mut rival = two.client(&rack, 2);
        let page = rival.create(4096).expect("there is memory").base();
        let mut bytes = [0; 8];
        let Ok(update) = owner.update(page, &mut bytes) else { panic!("not granted") };
        if count == 0 {
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(200) {
                let mut bytes = [0; 8];
                let is_busy = matches!(rival.try_update(page, &mut bytes), Err(Error::Busy { .. }));
                assert!(is_busy);
            }
        } else {
            until("a redirect", SOON, || !redirects(&rack).is_empty());
        }
        assert_eq!(redirects(&rack).len(), count, "{policy:?}");
        update.abort().expect("it is held");
        until("no redirect", SOON, || redirects(&rack).is_empty());
    }
}
