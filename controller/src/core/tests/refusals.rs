//! Joins that are refused.

use super::*;

#[test]
fn addresses_and_ports_of_the_infrastructure_are_refused() {
    let now = Instant::now();
    let own =
        ControllerPort { place: Place { switch: SWITCH, port: SwitchPort(16) }, mac: mac(16) };
    let config = CoreConfig { own_port: Some(own), ..CoreConfig::default() };
    let mut core = Core::new(config.clone(), Stored::default(), 1, now);
    core.learn_ports(SWITCH, ports(16));
    let claim = |mac, port| Join { mac, ..client("thief", port) };
    let way = Key::L2 { dst_mac: own.mac };
    let to_controller = Action::Forward(Forward { port: own.place.port, dst_mac: own.mac });
    assert_eq!(
        core.desired(SWITCH).entries[&way],
        Body::new(to_controller.clone()),
        "before any join"
    );
    for (join, owner) in [
        (claim(own.mac, 1), "02:00:00:00:00:10 is reserved for the controller"),
        (claim(mac(1), 16), "port 16 is reserved for the controller"),
        (claim(GATEWAY_MAC, 1), "02:bb:00:00:00:01 is reserved for the gateway"),
    ] {
        let refused = refusal(&mut core, now, &join);
        assert!(refused.contains(owner), "{refused}");
    }
    join(&mut core, now, &client("honest", 1));
    assert_eq!(core.desired(SWITCH).entries[&way].action, Some(to_controller.clone()));

    // A controller without knowledge of its own port may have admitted such an endpoint.
    let mut careless = Core::new(CoreConfig::default(), Stored::default(), 1, now);
    careless.learn_ports(SWITCH, ports(16));
    join(&mut careless, now, &claim(own.mac, 1));
    let mut disk = Disk::default();
    disk.write(careless.take_changes());
    let mut core = Core::new(config, disk.load(), 2, now);
    core.learn_ports(SWITCH, ports(16));
    assert_eq!(core.desired(SWITCH).entries[&way].action, Some(to_controller));
    core.learn_ports(SWITCH, ports(15));
    assert!(
        !core.desired(SWITCH).entries.values().any(|body| matches!(
            body.action,
            Some(Action::Forward(Forward { port: SwitchPort(16), .. }))
        )),
        "a switch without the port gets no entry for it"
    );
}

#[test]
fn attachments_are_checked_against_the_switch() {
    let (mut core, now) = core();
    assert!(refusal(&mut core, now, &client("a", 17)).contains("no port 17"));
    let by_name =
        |name: &str| Join { attachment: Attachment::Interface(name.to_owned()), ..client("a", 3) };
    assert!(refusal(&mut core, now, &by_name("sw99")).contains("no interface sw99"));
    assert_eq!(join(&mut core, now, &by_name("sw3")).port, 3);

    let mut unreached = Core::new(CoreConfig::default(), Stored::default(), 1, now);
    assert!(refusal(&mut unreached, now, &client("a", 1)).contains("not reached"));
    unreached.learn_ports(SWITCH, Ports::Unlisted);
    for port in [0, 510, 511, 1023] {
        assert!(refusal(&mut unreached, now, &client("a", port)).contains("numbered 1 to 509"));
    }
    assert!(refusal(&mut unreached, now, &by_name("sw1")).contains("use the port's number"));
    assert_eq!(join(&mut unreached, now, &client("a", 509)).port, 509);
}

#[test]
fn bad_names_are_quoted_on_one_line_and_shortened() {
    let (mut core, now) = core();
    let forged = "x\n2026-01-01T00:00:00Z ERROR bluebridge: forged\u{202e}\u{1b}[2J";
    let long = "n".repeat(3_000_000);
    for bad in ["", "a b", "a/b", "sixteen-bytes-if", forged, &long] {
        let attachment = Attachment::Interface(bad.to_owned());
        let mut joins = vec![Join { attachment, ..client("a", 1) }];
        if !bluebridge_northbound::is_name(bad) {
            joins.push(Join { name: bad.to_owned(), ..client("a", 1) });
        }
        for join in joins {
            let refused = refusal(&mut core, now, &join);
            assert!(refused.contains("it must have 1 to "), "{refused}");
            assert!(refused.len() < 300 && !refused.contains(char::is_control), "{refused:?}");
        }
    }
    let bad = Join { name: "a b".to_owned(), ..client("a", 1) };
    assert!(refusal(&mut core, now, &bad).starts_with("\"a b\" is not a name"));
    let bad = Join { name: long, ..client("a", 1) };
    assert!(refusal(&mut core, now, &bad).contains("... (3000000 bytes)"));
}

#[test]
fn malformed_joins_are_refused() {
    let (mut core, now) = core();
    let good = memory("m", 1, 10);
    let bad = [
        Join { name: "a b".to_owned(), ..good.clone() },
        Join { name: String::new(), ..good.clone() },
        Join { mac: MacAddr([1, 0, 0, 0, 0, 1]), ..good.clone() },
        Join { mac: MacAddr::default(), ..good.clone() },
        Join { mtu: 1279, ..good.clone() },
        Join { nonce: 0, ..good.clone() },
        Join { shard_count: 0, ..good.clone() },
        Join { shard_count: 257, ..good.clone() },
        Join { capacity_pages: 0, ..good.clone() },
        Join { capacity_pages: 1, ..client("c", 1) },
    ];
    let refusals: BTreeSet<String> = bad.iter().map(|join| refusal(&mut core, now, join)).collect();
    assert_eq!(refusals.len(), 8, "{refusals:?}");
    join(&mut core, now, &good);
}

#[test]
fn the_piece_fits_the_smallest_link_of_the_space() {
    let (mut core, now) = core();
    assert_eq!(core.piece_bytes(SPACE), 4096);
    join(&mut core, now, &memory("m", 1, 10));
    let small = join(&mut core, now, &Join { mtu: 1500, ..client("c", 2) });
    assert_eq!(core.piece_bytes(SPACE), piece_bytes(1500).unwrap());
    core.leave(now, member(&small)).unwrap();
    assert_eq!(core.piece_bytes(SPACE), 4096);
}
