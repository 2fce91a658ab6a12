mod world;

use std::ops::Range;

use bluebridge_northbound::migration::{
    Contents, Elsewhere, Generations, Order, OrderKind, Refusal, Report,
};
use bluebridge_wire::{ArenaGeneration, Space};

use super::*;
use world::{LINE, World, lines, server_record};

/// Random histories with every kind of trouble; a failure names the seed.
#[test]
fn every_migration_ends_and_every_line_has_one_server() {
    let (mut granted, mut moved, mut wipes) = (0, 0, 0);
    let (mut discarded, mut reclaimed) = (0, 0);
    for seed in 0..300 {
        let ran = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..2000 {
                world.step();
            }
            world.come_to_rest();
            (world.granted, world.moved, world.wipes, world.discarded, world.reclaimed)
        });
        let counts = ran.unwrap_or_else(|error| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(error)
        });
        granted += counts.0;
        moved += counts.1;
        wipes += counts.2;
        discarded += counts.3;
        reclaimed += counts.4;
    }
    assert!(granted > 1500 && moved > 1500 && wipes > 400, "{granted} {moved} {wipes}");
    println!("{discarded} lines were forgotten, and {reclaimed} used at home again");
    assert!(discarded > 20 && reclaimed > 20);
}

const HOME: NodeId = NodeId(1);

/// Four servers that are connected, each through the connection with the number of its node.
fn four() -> Migrations {
    let mut core = Migrations::default();
    for node in 1..=4 {
        core.note_server(&server_record(node, 4, 1));
        core.connect(NodeId(node), u64::from(node), true);
    }
    core
}

fn wanted(range: Range<u64>, taker: u16) -> Wanted {
    Wanted {
        home: HOME,
        space: Space(1),
        generation: None,
        pages: Some(lines(range)),
        taker: NodeId(taker),
    }
}

fn request(core: &mut Migrations, wanted: &Wanted) -> Vec<u64> {
    let planned = core.plan(wanted).unwrap();
    core.record(planned)
}

fn rows(range: Range<u64>) -> Vec<ServedRow> {
    let first = ArenaGeneration::new(4).unwrap();
    vec![ServedRow { pages: lines(range), generations: Generations { first, last: first } }]
}

fn hear(core: &mut Migrations, from: u16, report: Report) {
    core.handle(Instant::now(), NodeId(from), u64::from(from), report).unwrap();
}

fn orders(core: &Migrations) -> Vec<(u16, Order)> {
    let of = |node| core.orders(NodeId(node)).into_iter().map(move |order| (node, order));
    (1..=4).flat_map(of).collect()
}

fn stage(core: &Migrations, id: u64) -> Stage {
    core.iter().find(|of| of.record.id == id).unwrap().record.stage
}

fn run(core: &mut Migrations, id: u64, kept: Range<u64>) {
    testing::finish(core, id, &rows(kept));
    assert_eq!(stage(core, id), Stage::Closed);
}

#[test]
fn each_step_follows_the_report_of_the_one_before() {
    let mut core = four();
    let [id] = request(&mut core, &wanted(1..3, 2))[..] else { panic!("one giver") };
    let terms = core.iter().next().unwrap().record.terms();
    assert!(terms.range_epoch > 1 && terms.taker_incarnation == 1);
    assert_eq!(orders(&core), [(2, Order::Reserve(terms.clone()))]);
    hear(&mut core, 1, Report::Withdrawn(id));
    assert_eq!(stage(&core, id), Stage::Recorded, "nobody asked for it");
    hear(&mut core, 2, Report::Reserved(id));
    assert_eq!(orders(&core), [(1, Order::Allow(terms.clone()))]);
    let fences = vec![Fence { node: NodeId(9), incarnation: 7 }];
    hear(&mut core, 1, Report::Allowed { migration: id, fences: fences.clone() });
    assert_eq!(orders(&core), [(2, Order::Take { terms: terms.clone(), fences })]);
    let progress = |kept, is_done| Report::Progress {
        migration: id,
        kept,
        on_the_way_count: 1,
        in_doubt_count: 1,
        free_count: 0,
        is_done,
    };
    hear(&mut core, 2, progress(rows(1..2), false));
    let shown = core.iter().next().unwrap();
    assert_eq!((shown.record.kept.page_count(), shown.progress.in_doubt_count), (8, 1));
    assert_eq!(shown.waits, None);
    hear(&mut core, 2, progress(rows(1..3), true));
    assert_eq!(orders(&core), [(1, Order::Withdraw(id))]);
    hear(&mut core, 1, Report::Withdrawn(id));
    assert_eq!(orders(&core), [(2, Order::Settle(terms))]);
    hear(&mut core, 2, Report::Settled { migration: id, kept: rows(1..3) });
    let home = core.iter().next().unwrap().record.home.contents();
    let learn = Elsewhere { home, version: 1, rows: vec![(lines(1..3), NodeId(2))], lost: vec![] };
    assert_eq!(orders(&core), [(1, Order::Learn(learn))]);
    hear(&mut core, 1, Report::Learned { home, version: 1 });
    assert_eq!(orders(&core), [(1, Order::Forget(id))]);
    hear(&mut core, 1, Report::Forgotten(id));
    assert_eq!(orders(&core), [(2, Order::Release(id))]);
    hear(&mut core, 2, Report::Released(id));
    assert_eq!((stage(&core, id), orders(&core)), (Stage::Closed, vec![]));
    assert_eq!(core.cancel(id), Err(CancelError::Closed(id)));
}

#[test]
fn a_range_of_several_servers_is_split_and_moves_on() {
    let mut core = four();
    let [first] = request(&mut core, &wanted(0..2, 2))[..] else { panic!("one giver") };
    run(&mut core, first, 0..2);
    // Lines 0 and 1 are at the second server.
    let ids = request(&mut core, &wanted(1..4, 3));
    let givers: Vec<_> = core
        .iter()
        .filter(|of| ids.contains(&of.record.id))
        .map(|of| (of.record.giver.node, of.record.pages.clone()))
        .collect();
    assert_eq!(givers, [(2, lines(1..2)), (1, lines(2..4))]);
    run(&mut core, ids[0], 1..2);
    run(&mut core, ids[1], 2..4);
    let at: Vec<_> = core.elsewhere().next().unwrap().rows.iter().collect();
    let at: Vec<_> = at.into_iter().map(|(pages, at)| (pages.clone(), at.at.node)).collect();
    assert_eq!(at, [(lines(0..1), 2), (lines(1..4), 3)]);
    // And back home.
    for id in request(&mut core, &wanted(0..4, 1)) {
        let pages = core.iter().find(|of| of.record.id == id).unwrap().record.pages.clone();
        run(&mut core, id, pages.start / LINE..pages.end / LINE);
    }
    assert!(core.elsewhere().next().unwrap().rows.is_empty());
    assert_eq!(orders(&core), []);
    let epochs: Vec<_> = core.iter().map(|of| of.record.range_epoch).collect();
    assert!(epochs.is_sorted_by(|one, next| one < next), "{epochs:?}");
}

#[test]
fn a_range_of_several_shards_is_split() {
    let mut core = four();
    let shards = NodeRecord { shard_count: 2, ..server_record(1, 4, 1) };
    core.note_server(&shards);
    let all = Wanted { pages: None, ..wanted(0..1, 2) };
    let pages: Vec<_> = core.plan(&all).unwrap().into_iter().map(|it| it.pages).collect();
    let shard = 1 << 28;
    // Each shard has addresses for twice its memory.
    assert_eq!(pages, [lines(0..4), shard..shard + 4 * LINE]);
}

#[test]
fn what_cannot_move_is_refused_and_changes_nothing() {
    use MigrateError as E;
    let mut core = four();
    let [open] = request(&mut core, &wanted(1..2, 2))[..] else { panic!("one giver") };
    let _ = core.take_changes();
    core.connect(NodeId(3), 9, false);
    core.disconnect(NodeId(4), 4);
    let other_space = NodeRecord { space: 2, ..server_record(5, 4, 1) };
    core.note_server(&other_space);
    let refused = |wanted: &Wanted| core.plan(wanted).unwrap_err();
    let overlap = E::Overlap { migration: open, first: 8, last: 15 };
    assert_eq!(refused(&wanted(0..4, 2)), overlap);
    assert_eq!(refused(&wanted(0..1, 1)), E::Already { server: "s1".to_owned() });
    assert_eq!(refused(&wanted(0..1, 3)), E::Unsupported("s3".to_owned()));
    assert_eq!(
        refused(&wanted(0..1, 3)).to_string(),
        "memory server s3 does not support migration"
    );
    assert_eq!(refused(&wanted(0..1, 4)), E::NotConnected("s4".to_owned()));
    assert_eq!(refused(&wanted(0..1, 7)), E::NoServer(7));
    assert!(matches!(refused(&wanted(0..1, 5)), E::OtherSpace { theirs: 2, requested: 1, .. }));
    assert!(matches!(refused(&wanted(8..9, 2)), E::OutOfRange { .. }));
    assert!(matches!(refused(&wanted(2..2, 2)), E::OutOfRange { .. }));
    assert!(matches!(refused(&wanted(0..u64::MAX / LINE, 2)), E::OutOfRange { .. }));
    let earlier = Wanted { generation: ArenaGeneration::new(3), ..wanted(0..1, 2) };
    assert!(matches!(refused(&earlier), E::NoContents { generation: 3, .. }));
    let far = Wanted { pages: Some(u64::MAX - 1..u64::MAX), ..wanted(0..1, 2) };
    assert!(matches!(refused(&far), E::OutOfRange { .. }));
    assert_eq!(core.take_changes(), []);
    assert_eq!(core.cancel(77), Err(CancelError::Unknown(77)));
}

#[test]
fn a_home_that_lost_its_memory_does_not_take_lines_back_and_others_may() {
    let mut core = four();
    let [id] = request(&mut core, &wanted(0..2, 2))[..] else { panic!("one giver") };
    run(&mut core, id, 0..2);
    let [open] = request(&mut core, &wanted(2..3, 3))[..] else { panic!("one giver") };
    hear(&mut core, 3, Report::Reserved(open));
    let earlier = |core: &Migrations| -> Vec<_> {
        let rows = core.earlier(HOME);
        rows.map(|row| (row.generation.number(), row.pages, row.at)).collect()
    };
    assert_eq!(earlier(&core), []);
    core.note_server(&server_record(1, 6, 2));
    // What the home learns when it joins: where its lines may be. The others are lost with its memory.
    assert_eq!(earlier(&core), [(4, lines(0..3), None)]);
    core.connect(HOME, 1, true);
    let old = Wanted { generation: ArenaGeneration::new(5), ..wanted(0..2, 1) };
    assert!(matches!(core.plan(&old), Err(MigrateError::Unsettled { .. })));
    let of_home = Contents { node: HOME, generation: ArenaGeneration::new(4).unwrap() };
    let began = ArenaGeneration::new(6).unwrap();
    let lose = Order::Lose { node: HOME, began };
    let loses = [(2, lose.clone()), (3, lose)];
    assert_eq!(orders(&core), loses, "all learn it before anything else");
    for server in [2, 3] {
        hear(&mut core, server, Report::Lost { node: HOME, began });
    }
    let is_settled = |(server, order): &(u16, Order)| (*server, matches!(order, Order::Settle(_)));
    assert!(orders(&core).iter().any(|it| is_settled(it) == (3, true)));
    hear(&mut core, 3, Report::Settled { migration: open, kept: vec![] });
    let none = |round| Report::Claims {
        home: of_home,
        round,
        served: vec![],
        given: vec![],
        lost: vec![],
    };
    hear(&mut core, 3, none(3));
    assert_eq!(orders(&core), [(2, Order::Report { home: of_home, round: 3 })]);
    let claims = |round| Report::Claims {
        home: of_home,
        round,
        served: rows(0..1),
        given: vec![],
        lost: vec![],
    };
    hear(&mut core, 2, claims(2));
    assert_eq!(orders(&core).len(), 1, "that was another round");
    assert_eq!(earlier(&core), [(4, lines(0..3), None)]);
    hear(&mut core, 2, claims(3));
    assert_eq!(earlier(&core), [(4, lines(0..1), Some(NodeId(2)))]);
    let learn =
        Elsewhere { home: of_home, version: 4, rows: vec![(lines(0..1), NodeId(2))], lost: vec![] };
    assert_eq!(orders(&core), [(1, Order::Learn(learn))]);
    assert!(matches!(core.plan(&old), Err(MigrateError::LostHome { .. })));
    let all = Wanted { pages: None, ..old };
    let on = core.plan(&Wanted { taker: NodeId(3), ..all.clone() }).unwrap();
    assert_eq!(on.iter().map(|it| it.pages.clone()).collect::<Vec<_>>(), [lines(0..1)]);
    let lost = Wanted { pages: Some(lines(1..2)), taker: NodeId(3), ..all };
    assert!(matches!(core.plan(&lost), Err(MigrateError::Lost { .. })));
}

#[test]
fn a_controller_that_starts_again_asks_for_the_fences_again() {
    let mut core = four();
    let mut disk = testing::Disk::default();
    let [id] = request(&mut core, &wanted(0..2, 2))[..] else { panic!("one giver") };
    hear(&mut core, 2, Report::Reserved(id));
    hear(&mut core, 1, Report::Allowed { migration: id, fences: Vec::new() });
    core.take_changes().iter().for_each(|change| disk.write(change));
    let nodes: Vec<_> = (1..=4).map(|node| server_record(node, 4, 1)).collect();
    let mut core = Migrations::new(disk.load(), &nodes);
    assert_eq!(orders(&core), [], "nobody is connected");
    let waits = |core: &Migrations| core.iter().next().unwrap().waits;
    assert_eq!(waits(&core).as_deref(), Some("s1 has no connection to the controller"));
    for node in [1, 2] {
        core.connect(NodeId(node), u64::from(node), true);
    }
    let terms = core.iter().next().unwrap().record.terms();
    assert_eq!(orders(&core), [(1, Order::Allow(terms.clone()))]);
    hear(&mut core, 1, Report::Allowed { migration: id, fences: Vec::new() });
    assert_eq!(orders(&core), [(2, Order::Take { terms, fences: Vec::new() })]);
}

#[test]
fn refusals_end_a_migration_with_their_reason_or_are_put_off() {
    let refuse = |core: &mut Migrations, from, migration, order, why| {
        hear(core, from, Report::Refused { migration, order, why });
    };
    let why = |core: &Migrations, id| {
        let of = core.iter().find(|of| of.record.id == id).unwrap();
        of.record.why(|node| format!("s{node}")).unwrap()
    };
    let mut core = four();
    let [id] = request(&mut core, &wanted(0..2, 2))[..] else { panic!("one giver") };
    refuse(&mut core, 2, id, OrderKind::Reserve, Refusal::NoRoom);
    assert_eq!(orders(&core), [(2, Order::Release(id))], "the giver never knew it");
    assert_eq!(why(&core, id), "s2 refused it: it has too little free memory");
    refuse(&mut core, 2, id, OrderKind::Release, Refusal::Unknown);
    assert_eq!(stage(&core, id), Stage::Closed);

    let [id] = request(&mut core, &wanted(0..2, 2))[..] else { panic!("one giver") };
    hear(&mut core, 2, Report::Reserved(id));
    refuse(&mut core, 1, id, OrderKind::Allow, Refusal::Other("x\ny".repeat(1000)));
    assert!(why(&core, id).len() < 300 && !why(&core, id).contains('\n'));
    assert_eq!(orders(&core), [(1, Order::Withdraw(id))], "it may have obeyed before");
    refuse(&mut core, 1, id, OrderKind::Withdraw, Refusal::Unknown);
    refuse(&mut core, 2, id, OrderKind::Settle, Refusal::Full);
    let waits = core.iter().find(|of| of.record.id == id).unwrap().waits.unwrap();
    assert!(waits.contains("s2 refused the last order"), "{waits}");
    assert_eq!(orders(&core), []);
    core.retry();
    let terms = core.iter().find(|of| of.record.id == id).unwrap().record.terms();
    assert_eq!(orders(&core), [(2, Order::Settle(terms))]);
    let wrong = Report::Refused { migration: id, order: OrderKind::Settle, why: Refusal::Full };
    let now = Instant::now();
    assert_eq!(core.handle(now, NodeId(3), 3, wrong), Err(ReportError::OtherRole));
}

#[test]
fn a_taker_that_is_away_delays_the_migrations_after_it_only_for_a_time() {
    let mut core = four();
    let [first] = request(&mut core, &wanted(0..1, 2))[..] else { panic!("one giver") };
    let [second] = request(&mut core, &wanted(1..2, 3))[..] else { panic!("one giver") };
    let waits = |core: &Migrations| {
        let of = core.iter().find(|of| of.record.id == second).unwrap();
        (of.record.stage, of.waits.unwrap_or_default())
    };
    let start = Instant::now();
    core.disconnect(NodeId(2), 2);
    core.handle_timeout(start);
    core.handle_timeout(start + ABSENCE);
    assert_eq!(stage(&core, first), Stage::Recorded, "nothing waits for it");
    hear(&mut core, 3, Report::Reserved(second));
    assert_eq!(waits(&core), (Stage::Reserved, format!("migration {first} is before it")));
    // One that was here for a moment has its time again.
    core.connect(NodeId(2), 2, true);
    core.disconnect(NodeId(2), 2);
    core.handle_timeout(start + ABSENCE);
    core.handle_timeout(start + ABSENCE * 2 - Duration::from_millis(1));
    assert_eq!(waits(&core).1, format!("migration {first} is before it"));
    core.handle_timeout(start + ABSENCE * 2);
    assert_eq!(waits(&core).1, "s1 must allow it");
    let of = core.iter().find(|of| of.record.id == first).unwrap();
    let why = of.record.why(|node| format!("s{node}")).unwrap();
    assert!(why.starts_with("s2 had no connection to the controller"), "{why}");
    // What the giver may know goes on, whoever is away.
    hear(&mut core, 1, Report::Allowed { migration: second, fences: Vec::new() });
    let [third] = request(&mut core, &wanted(2..3, 4))[..] else { panic!("one giver") };
    core.disconnect(NodeId(3), 3);
    hear(&mut core, 4, Report::Reserved(third));
    core.handle_timeout(start + ABSENCE * 2);
    core.handle_timeout(start + ABSENCE * 4);
    assert_eq!(stage(&core, second), Stage::Allowed);
    assert!(
        orders(&core)
            .iter()
            .any(|(server, order)| *server == 1 && matches!(order, Order::Allow(_)))
    );
    core.connect(NodeId(2), 5, true);
    assert!(orders(&core).contains(&(2, Order::Release(first))), "it may have reserved frames");
}

#[test]
fn reports_with_impossible_rows_change_nothing() {
    let mut core = four();
    let [id] = request(&mut core, &wanted(1..3, 2))[..] else { panic!("one giver") };
    hear(&mut core, 2, Report::Reserved(id));
    hear(&mut core, 1, Report::Allowed { migration: id, fences: Vec::new() });
    let generation = |number| ArenaGeneration::new(number).unwrap();
    let row = |pages: Range<u64>, first, last| ServedRow {
        pages,
        generations: Generations { first: generation(first), last: generation(last) },
    };
    let bad = [
        vec![row(0..16, 4, 4)],
        vec![row(8..32, 4, 4)],
        vec![row(8..12, 4, 4)],
        vec![row(16..16, 4, 4)],
        vec![row(16..24, 4, 4), row(8..16, 4, 4)],
        vec![row(8..24, 4, 4), row(16..24, 4, 4)],
        vec![row(8..16, 3, 4)],
        vec![row(8..16, 5, 4)],
        vec![row(u64::MAX - 7..u64::MAX, 4, 4)],
    ];
    let _ = core.take_changes();
    for kept in bad {
        let report = Report::Settled { migration: id, kept: kept.clone() };
        let now = Instant::now();
        assert_eq!(core.handle(now, NodeId(2), 2, report), Err(ReportError::BadRows), "{kept:?}");
        let waits = core.iter().next().unwrap().waits.unwrap();
        assert!(
            waits.starts_with("a report of s2 is ignored: its rows are not in order"),
            "{waits}"
        );
    }
    assert_eq!(core.take_changes(), []);
    // One that can be right ends the complaint.
    hear(&mut core, 2, testing::progress(id, &rows(1..2), false));
    assert_eq!(core.iter().next().unwrap().waits, None);
}

#[test]
fn migrations_are_so_small_that_their_rows_can_be_reported() {
    let mut core = Migrations::default();
    for node in 1..=2 {
        core.note_server(&NodeRecord { capacity_pages: 3 << 20, ..server_record(node, 4, 1) });
        core.connect(NodeId(node), u64::from(node), true);
    }
    let wanted = Wanted { pages: Some(8..(5 << 19) + 8), ..wanted(0..1, 2) };
    let ids = request(&mut core, &wanted);
    let ranges: Vec<_> = core.iter().map(|of| of.record.pages.clone()).collect();
    let half = 1 << 20;
    assert_eq!(ranges, [8..half + 8, half + 8..2 * half + 8, 2 * half + 8..5 * half / 2 + 8]);
    hear(&mut core, 2, Report::Reserved(ids[0]));
    hear(&mut core, 1, Report::Allowed { migration: ids[0], fences: Vec::new() });
    // Every second line is free, and stays at home: there can be no more rows.
    let first = ArenaGeneration::new(4).unwrap();
    let row = |line: u64| ServedRow {
        pages: (1 + 2 * line) * 8..(2 + 2 * line) * 8,
        generations: Generations { first, last: first },
    };
    let kept: Vec<_> = (0..1 << 16).map(row).collect();
    hear(&mut core, 2, testing::progress(ids[0], &kept, false));
    assert_eq!(core.iter().next().unwrap().waits, None);
    assert_eq!(testing::record_of(&core, ids[0]).kept.iter().count(), 1 << 16);
}

#[test]
fn a_server_with_too_many_rows_of_a_home_is_named() {
    let mut core = four();
    let [id] = request(&mut core, &wanted(0..4, 2))[..] else { panic!("one giver") };
    run(&mut core, id, 0..4);
    let [second] = request(&mut core, &wanted(0..2, 3))[..] else { panic!("one giver") };
    // The fourth server had nothing; the third loses its memory while it takes.
    hear(&mut core, 3, Report::Reserved(second));
    let began = ArenaGeneration::new(9).unwrap();
    core.note_server(&server_record(3, 9, 2));
    core.connect(NodeId(3), 3, true);
    for node in [1, 2] {
        hear(&mut core, node, Report::Lost { node: NodeId(3), began });
    }
    let due = orders(&core).into_iter().find_map(|(server, order)| match order {
        Order::Report { home, round } if server == 2 => Some((home, round)),
        _ => None,
    });
    let (home, round) = due.expect("servers are asked");
    let generations = Generations { first: home.generation, last: home.generation };
    let claims = |count: u64| {
        let row = |line: u64| ServedRow { pages: 16 * line..16 * line + 8, generations };
        let served = (0..count).map(row).collect();
        Report::Claims { home, round, served, given: Vec::new(), lost: Vec::new() }
    };
    let most = 1 << 18;
    let report =
        |core: &mut Migrations, count| core.handle(Instant::now(), NodeId(2), 2, claims(count));
    let too_many = ReportError::TooManyRows { count: most + 1, most };
    assert_eq!(report(&mut core, 1 + most as u64), Err(too_many));
    let words = "where pages of s1 are is not known: a report of s2 is ignored: it has 262145 rows of pages, and at \
                 most 262144 are possible; restart that server without its memory to give them up";
    assert_eq!(core.plan(&wanted(4..8, 4)).unwrap_err().to_string(), words);
    // As many as are possible are handled.
    assert_eq!(report(&mut core, most as u64), Ok(()));
    let unsettled = core.plan(&wanted(4..8, 4));
    assert!(matches!(unsettled, Err(MigrateError::Unsettled { .. })), "{unsettled:?}");
}

#[test]
fn closed_migrations_are_forgotten_and_ids_go_on() {
    let mut core = four();
    let mut disk = testing::Disk::default();
    for round in 0..110 {
        let taker = if round % 2 == 0 { 2 } else { 1 };
        let [id] = request(&mut core, &wanted(0..2, taker))[..] else { panic!("one giver") };
        assert_eq!(id, round + 1);
        run(&mut core, id, 0..2);
        core.take_changes().iter().for_each(|change| disk.write(change));
    }
    assert_eq!((core.iter().count(), disk.load().records.len()), (100, 100));
    let nodes: Vec<_> = (1..=4).map(|node| server_record(node, 4, 1)).collect();
    let mut again = Migrations::new(disk.load(), &nodes);
    for node in 1..=4 {
        again.connect(NodeId(node), 1, true);
    }
    let next = again.plan(&wanted(0..2, 2)).unwrap();
    assert_eq!((next[0].id, next[0].range_epoch), (111, 112));
}
