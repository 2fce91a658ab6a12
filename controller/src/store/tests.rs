use bluebridge_testkit::Scratch;
use redb::TableHandle as _;

use super::*;
use crate::core::{Carrier, Role};

/// The store's file name.
const FILE: &str = "controller.redb";

fn record(node: u16, incarnation: u32) -> NodeRecord {
    NodeRecord {
        switch: String::new(),
        node,
        name: format!("n{node}"),
        role: Role::Memory,
        space: 3,
        incarnation,
        first_incarnation: 1,
        generation: 4,
        last_generation: 9,
        range_epoch: 5,
        token: [6; 16],
        nonce: u64::MAX,
        mac: [2, 0, 0, 0, 0, 1],
        port: 7,
        carrier: Carrier::Xdp,
        mtu: 9000,
        shard_count: 2,
        capacity_pages: u64::MAX - 1,
        level: Some(30),
        attached: true,
        retired: false,
        notices: true,
    }
}

#[test]
fn what_was_committed_is_there_after_a_restart() {
    let folder = Scratch::new("restart");
    let store = Store::open(&folder.file(FILE)).unwrap();
    let first = store.election_id();
    let first_generation = store.first_generation();
    assert_eq!(store.load().unwrap(), Stored { first_generation, ..Stored::default() });
    let spaces = [SpaceRecord { space: 3, group: 2 }, SpaceRecord { space: 4, group: 3 }];
    store
        .commit(&[
            Change::Node(record(1, 1)),
            Change::Node(record(0xfffe, 1)),
            Change::Space(spaces[0]),
            Change::Space(spaces[1]),
        ])
        .unwrap();
    store.commit(&[Change::Node(record(1, 2)), Change::SpaceGone(4)]).unwrap();
    drop(store);
    let store = Store::open(&folder.file(FILE)).unwrap();
    let nodes = vec![record(1, 2), record(0xfffe, 1)];
    let migrations = StoredMigrations::default();
    let expected =
        Stored { nodes, spaces: vec![spaces[0]], first_generation, migrations, rebalance: None };
    assert_eq!(store.load().unwrap(), expected);
    assert!(store.election_id() > first.connection(u64::MAX), "a later start beats every earlier");
    assert_eq!(store.start_count(), 2);
}

#[test]
fn migrations_are_there_after_a_restart() {
    use crate::migration::rebalance::RebalanceRecord;
    use crate::migration::{
        DeputyRecord, DrainRecord, ElsewhereRecord, End, GenerationRange, LossRecord,
        MigrationRecord, PageMap, Placed, RefusalRecord, Stage,
    };
    let folder = Scratch::new("migrations");
    let at = |node| ContentsRecord { node, generation: 4 };
    let generations = GenerationRange { first: 4, last: 5 };
    let record = MigrationRecord {
        id: 7,
        home: at(1),
        space: 3,
        pages: 8..24,
        giver: at(1),
        taker: at(2),
        taker_incarnation: 9,
        range_epoch: 10,
        stage: Stage::Ending,
        kept: PageMap::from_iter([(8..16, generations)]),
        end: Some(End::Refused { node: 2, why: RefusalRecord::Other("x".to_owned()) }),
        reason: "s1 is drained".to_owned(),
    };
    let placed = Placed { at: at(2), generations };
    let elsewhere = ElsewhereRecord {
        home: at(1),
        space: 3,
        version: 2,
        is_pending: true,
        rows: PageMap::from_iter([(32..40, placed)]),
        lost: PageMap::from_iter([(0..8, ())]),
    };
    let loss = LossRecord { node: 3, began: 6, unaware: [1, 2].into() };
    let gone = LossRecord { node: 4, ..loss.clone() };
    let deputy = DeputyRecord {
        node: 1,
        incarnation: 4,
        last_generation: 9,
        range_epoch: 5,
        at: 2,
        at_incarnation: 6,
        idle_ms: 1234,
    };
    let drain = DrainRecord { node: 1, after: 5, empty: true };
    let store = Store::open(&folder.file(FILE)).unwrap();
    let closed = MigrationRecord { id: 6, stage: Stage::Closed, ..record.clone() };
    let changes = [
        Change::Migration(closed),
        Change::Migration(record.clone()),
        Change::Elsewhere(elsewhere.clone()),
        Change::Loss(loss.clone()),
        Change::Loss(gone),
        Change::Drain(drain),
        Change::Deputy(deputy),
        Change::Deputy(DeputyRecord { node: 3, ..deputy }),
        Change::Drain(DrainRecord { node: 2, ..drain }),
        Change::Rebalance(Some(RebalanceRecord { window_ms: 7 })),
    ];
    store.commit(&changes).unwrap();
    store
        .commit(&[
            Change::MigrationGone(6),
            Change::LossGone(4),
            Change::DrainGone(2),
            Change::DeputyGone(3),
        ])
        .unwrap();
    drop(store);
    let store = Store::open(&folder.file(FILE)).unwrap();
    let (records, elsewhere, losses) = (vec![record], vec![elsewhere], vec![loss]);
    let expected = StoredMigrations {
        records,
        elsewhere,
        losses,
        drains: vec![drain],
        deputies: vec![deputy],
    };
    let loaded = store.load().unwrap();
    assert_eq!(
        (loaded.migrations, loaded.rebalance),
        (expected, Some(RebalanceRecord { window_ms: 7 }))
    );
    store.commit(&[Change::Rebalance(None)]).unwrap();
    assert_eq!(store.load().unwrap().rebalance, None);
}

#[test]
fn a_store_of_before_is_read_and_no_older_controller_reads_it_then() {
    FORMATS_BEFORE.for_each(read_store_of);
}

fn read_store_of(format: u64) {
    let folder = Scratch::new("before");
    let store = Store::open(&folder.file(FILE)).unwrap();
    store.commit(&[Change::Node(record(1, 1))]).unwrap();
    let write = store.database.begin_write().unwrap();
    {
        let mut numbers = write.open_table(NUMBERS).unwrap();
        numbers.insert("format", format).unwrap();
        let mut nodes = write.open_table(NODES).unwrap();
        let mut json: serde_json::Value =
            serde_json::from_slice(nodes.get(1).unwrap().unwrap().value()).unwrap();
        json.as_object_mut().unwrap().remove("last_generation").unwrap();
        nodes.insert(1, serde_json::to_vec(&json).unwrap().as_slice()).unwrap();
    }
    for table in [MIGRATIONS.name(), ELSEWHERE.name(), LOSSES.name()] {
        let is_it = |handle: &redb::UntypedTableHandle| handle.name() == table;
        let handle = write.list_tables().unwrap().find(is_it).unwrap();
        assert!(write.delete_table(handle).unwrap());
    }
    write.commit().unwrap();
    drop(store);
    let store = Store::open(&folder.file(FILE)).unwrap();
    let nodes = store.load().unwrap().nodes;
    assert_eq!(nodes[0].generations(), 4..=4, "one was reserved for each incarnation");
    let read = store.database.begin_read().unwrap();
    let numbers = read.open_table(NUMBERS).unwrap();
    assert_eq!(numbers.get("format").unwrap().unwrap().value(), FORMAT);
}

#[test]
fn a_newer_store_beats_an_older_one() {
    let older = Store::in_memory().unwrap();
    let newer = Store::in_memory().unwrap();
    assert!(newer.election_id() > older.election_id().connection(u64::MAX));
}

#[test]
fn a_fenced_store_stays_fenced_until_it_outbids_the_other() {
    let folder = Scratch::new("fenced");
    let right = Store::open(&folder.file(FILE)).unwrap();
    let intruder = Store::in_memory().unwrap().election_id().connection(7);
    assert!(intruder > right.election_id());
    assert_eq!(right.fenced_by(), None);
    right.note_fenced(intruder).unwrap();
    drop(right);
    let right = Store::open(&folder.file(FILE)).unwrap();
    assert_eq!(right.fenced_by(), Some(intruder), "a restart changes nothing");
    assert!(right.election_id() < intruder);
    let above = right.outbid(intruder).unwrap();
    assert!(above > intruder && above == right.election_id());
    drop(right);
    let right = Store::open(&folder.file(FILE)).unwrap();
    assert_eq!(right.fenced_by(), None);
    let later = right.election_id();
    assert!(later > above.connection(u64::MAX), "later starts win as well");
    assert_eq!(right.outbid(intruder).unwrap(), later, "it is higher already");
    let last = ElectionId { high: u64::MAX, low: 0 };
    assert!(right.outbid(last).is_err(), "there is no greater one");
    assert_eq!(right.election_id(), later);
}

#[test]
fn stores_of_other_times_begin_at_other_generations() {
    let tick = 1 << BIRTH_TICK_BITS;
    let birth = 1_800_000_000_000_000_000_u64;
    let firsts: Vec<u16> =
        (0..FIRST_GENERATIONS).map(|ticks| first_generation(birth + ticks * tick)).collect();
    let different: std::collections::BTreeSet<u16> = firsts.iter().copied().collect();
    assert_eq!(different.len(), firsts.len(), "none is repeated for half an hour");
    assert!(firsts.iter().all(|first| *first < 0x4000), "half is left for restarts");
    // A store that is deleted a few times in a row never repeats its first generation or the next one.
    for (index, first) in firsts.iter().enumerate() {
        for later in firsts.iter().skip(index + 1).take(8) {
            assert!(first.abs_diff(*later) > 100, "{first} {later}");
        }
    }
}

#[test]
fn one_process_at_a_time_has_the_store() {
    let folder = Scratch::new("exclusive");
    let store = Store::open(&folder.file(FILE)).unwrap();
    let error = Store::open(&folder.file(FILE)).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(store);
    Store::open(&folder.file(FILE)).unwrap();
}

#[test]
fn a_file_of_something_else_is_refused_and_left_alone() {
    let folder = Scratch::new("foreign");
    let file = folder.file("letter.txt");
    std::fs::write(&file, "another program's file").unwrap();
    assert!(matches!(Store::open(&file), Err(StoreError::NotAStore { .. })));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "another program's file");
    for device in ["/dev/null", "/dev/full"] {
        let error = Store::open(Path::new(device)).unwrap_err();
        assert!(matches!(error, StoreError::NotAStore { .. }), "{device}: {error}");
    }
}

#[test]
fn a_store_that_was_cut_short_is_named_as_damaged_and_left_alone() {
    let folder = Scratch::new("cut");
    let store = Store::open(&folder.file(FILE)).unwrap();
    store.commit(&[Change::Node(record(1, 1))]).unwrap();
    drop(store);
    let whole = std::fs::read(folder.file(FILE)).unwrap();
    for length in [100, 5000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(folder.file(FILE), &whole[..length]).unwrap();
        let error = Store::open(&folder.file(FILE)).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{length}: {error}");
        assert!(error.to_string().contains("move it away and start once with --force"), "{error}");
        assert_eq!(std::fs::metadata(folder.file(FILE)).unwrap().len(), length as u64);
    }
    std::fs::write(folder.file(FILE), &whole).unwrap();
    assert_eq!(Store::open(&folder.file(FILE)).unwrap().load().unwrap().nodes, [record(1, 1)]);
}

fn mode(file: &Path) -> u32 {
    std::fs::metadata(file).unwrap().mode() & 0o777
}

#[test]
fn only_its_owner_can_read_the_store() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = Scratch::new("mode");
    let file = folder.file(FILE);
    drop(Store::open(&file).unwrap());
    assert_eq!(mode(&file), 0o600, "a new one");
    for wide in [0o644, 0o660, 0o777, 0o604] {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(wide)).unwrap();
        let store = Store::open(&file).unwrap();
        assert_eq!(mode(&file), 0o600, "one that had {wide:o}");
        assert!(Store::open(&file).is_err(), "it is still locked");
        drop(store);
    }
    let letter = folder.file("letter.txt");
    std::fs::write(&letter, "another program's file").unwrap();
    std::fs::set_permissions(&letter, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(Store::open(&letter).is_err());
    assert_eq!(mode(&letter), 0o644, "a file that is not a store does not change");
}

#[test]
fn a_record_that_cannot_be_read_is_named() {
    let store = Store::in_memory().unwrap();
    let write = store.database.begin_write().unwrap();
    write.open_table(NODES).unwrap().insert(9, b"{}".as_slice()).unwrap();
    write.commit().unwrap();
    let error = store.load().unwrap_err().to_string();
    assert!(error.contains("a record of node 9"), "{error}");
}

#[test]
fn a_folder_that_is_not_there_is_named_and_not_made() {
    let folder = Scratch::new("absent");
    let absent = folder.file("mount");
    let error = Store::open(&absent.join("controller.redb")).unwrap_err();
    assert!(matches!(error, StoreError::NoFolder { .. }), "{error}");
    assert!(error.to_string().contains(&format!("no directory {}", absent.display())), "{error}");
    assert!(!absent.exists());
    let error = Store::open(folder.path()).unwrap_err();
    assert!(matches!(error, StoreError::Open { .. }), "a directory is no store: {error}");
}
