//! The map of an arena, beside its file and in its process.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use bluebridge_protocol::store::PageStore;
use bluebridge_testkit::{namespace::in_thread, require_root};
use bluebridge_wire::{ArenaGeneration, address::PAGE_BYTES};

use super::rig::{File, PAGES, SERVER, SHARDS, SPACE};
use crate::{
    Arena, ArenaConfig, ArenaFile,
    direct::map::{self, Lent},
    kept::{self, Holder, Listed, Place, Reader},
    memory::Windows,
};

#[test]
fn a_map_outlives_its_process_and_is_dropped_with_its_file() {
    require_root();
    let file = File::new("direct-kept");
    let holder = Holder {
        node: SERVER,
        generation: ArenaGeneration::new(5).expect("small"),
        token: [7; 16],
    };
    let open = |options: ArenaFile| options.open(|_, _| ControlFlow::Continue(()));
    let config = ArenaConfig { generation: holder.generation, ..ArenaConfig::default() };
    let grant = {
        let reserved = open(file.options()).unwrap().assign(holder).unwrap();
        assert!(open(file.options()).is_err(), "it is in use as long as its pages are");
        let mut parts = reserved.parts.into_iter();
        let mut arena = Arena::open(&config, parts.next().unwrap()).unwrap();
        let grant = arena.create(SPACE, 1).unwrap();
        arena.complete(grant.location);
        arena.write(grant.location.page(), 0, &[9; PAGE_BYTES]);
        arena.set_leased(grant.location.page(), true);
        grant
    };
    let listed = Listed::of(&file.0).unwrap();
    assert_eq!((listed.is_arena, listed.holder, listed.process), (true, Some(holder), None));
    // With the page of the file.
    let page_bytes = PAGE_BYTES as u64;
    assert_eq!(listed.bytes, (PAGES * u64::from(SHARDS) + 1) * page_bytes);
    // Also by a server that no longer wants it.
    let kept = open(ArenaFile { is_direct: false, ..file.options() }).unwrap();
    assert_eq!(kept.holder(), Some(holder));
    assert!(kept.direct_refusal().is_none(), "it is where it is");
    let mut reserved = kept.assign(holder).unwrap();
    let arena = Arena::open(&config, reserved.parts.remove(0)).unwrap();
    drop(reserved);
    assert!(arena.read(grant.location.page(), 0..PAGE_BYTES) == [9; PAGE_BYTES]);
    drop(arena);
    // Under another spelling of its name.
    let (directory, name) = (file.0.parent().unwrap(), file.0.file_name().unwrap());
    let respelled = File(directory.join(".").join(name));
    assert_eq!(open(respelled.options()).unwrap().holder(), Some(holder));
    std::mem::forget(respelled);
    // Another map cannot take its place, and none cannot, either; nothing of it is changed.
    let pin = pins(&file.0).pop().expect("it is pinned");
    fs::remove_file(&pin).unwrap();
    let gone = open(file.options()).unwrap_err().advice(&Reader::Server);
    assert!(gone.contains("is gone") && gone.contains("--fresh"), "{gone}");
    let other = map::create(&[1; 16], usize::try_from(listed.bytes).unwrap()).unwrap();
    map::pin(&other, &pin).unwrap();
    map::remove(&[1; 16]).unwrap();
    assert!(open(file.options()).is_err());
    drop(other);
    // An empty one takes the place of one with contents, here and in a file.
    let fresh = ArenaFile { is_fresh: true, ..file.options() };
    drop(open(fresh.clone()).unwrap().assign(holder).unwrap());
    assert_eq!(pins(&file.0).len(), 1);
    let in_file = ArenaFile { is_direct: false, ..fresh.clone() };
    drop(open(in_file).unwrap().assign(holder).unwrap());
    assert_eq!(pins(&file.0), Vec::<PathBuf>::new(), "its map is given up");
    drop(open(fresh).unwrap().assign(holder).unwrap());
    Listed::drop_file(&file.0).unwrap();
    assert!(!file.0.exists());
    assert_eq!(pins(&file.0), Vec::<PathBuf>::new());
}

/// Files of other names than those by default, and maps that no file describes.
#[test]
fn maps_are_listed_and_dropped_with_and_without_their_files() {
    require_root();
    let file = File::new("direct-listed");
    let generation = ArenaGeneration::new(5).expect("small");
    let holder = Holder { node: SERVER, generation, token: [7; 16] };
    let open = || file.options().open(|_, _| ControlFlow::Continue(()));
    let used = open().unwrap().assign(holder).unwrap();
    let id = used.direct.as_ref().unwrap().id;
    let pin = bluebridge_bpf::fs::arena_pin(&id);
    let look = || {
        let found = kept::list().0.into_iter().find(|listed| listed.id == Some(id));
        found.map(|listed| (listed.path, listed.place))
    };
    let path = fs::canonicalize(&file.0).unwrap();
    assert_eq!(look(), Some((path.clone(), Place::InMap)));
    let refused = Listed::drop_file(&pin).unwrap_err().advice(&Reader::Arenas);
    assert!(refused.contains("drop that file instead") && pin.exists(), "{refused}");
    drop(used);
    // A copy is not the file.
    let copy = File::new("direct-listed-copy");
    fs::copy(&file.0, &copy.0).unwrap();
    assert_eq!(Listed::of(&copy.0).unwrap().place, Place::OfOriginal);
    fs::rename(&copy.0, &file.0).unwrap();
    assert_eq!(look(), Some((pin.clone(), Place::InMapAlone)));
    let listed = Listed::of(&pin).unwrap();
    assert!(listed.bytes >= PAGES * u64::from(SHARDS) * PAGE_BYTES as u64, "{listed:?}");
    let name = format!("{:032x}", u128::from_be_bytes(id));
    assert_eq!(kept::place_named(Path::new(&name)), pin);
    Listed::drop_file(&pin).unwrap();
    assert!(!pin.exists());
    assert_eq!(look(), None);
    assert!(Listed::drop_file(&pin).is_err(), "it is gone");
    // And a file whose map is gone.
    fs::remove_file(&file.0).unwrap();
    drop(open().unwrap().assign(holder).unwrap());
    pins(&file.0).iter().for_each(|pin| fs::remove_file(pin).unwrap());
    let listed = Listed::of(&file.0).unwrap();
    assert_eq!((listed.place, listed.bytes), (Place::Gone, PAGE_BYTES as u64));
    Listed::drop_file(&file.0).unwrap();
    assert!(!file.0.exists());
}

/// In a container root may lack them; then an error of the kernel alone would not say which.
#[test]
fn capabilities_that_are_missing_are_named() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    require_root();
    in_thread(|| {
        // `SYS_ADMIN` includes the others.
        let lost = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_ADMIN;
        let mut sets = capabilities(None).expect("the kernel says");
        let before = sets.effective;
        sets.effective -= lost;
        set_capabilities(None, sets).expect("less is permitted");
        let refused = crate::direct::probe("lo").expect_err("it is not permitted");
        sets.effective = before - CapabilitySet::SYS_ADMIN - CapabilitySet::NET_ADMIN;
        set_capabilities(None, sets).expect("they are permitted");
        let refused_network = crate::direct::probe("lo").expect_err("it is not permitted");
        assert!(refused.to_string().contains("lacks CAP_BPF, CAP_PERFMON;"), "{refused}");
        assert!(refused_network.to_string().contains("lacks CAP_NET_ADMIN;"), "{refused_network}");
    });
}

#[test]
fn a_copy_of_a_file_has_no_memory() {
    require_root();
    let (file, copy) = (File::new("direct-original"), File::new("direct-copy"));
    let generation = ArenaGeneration::new(5).expect("small");
    let holder = Holder { node: SERVER, generation, token: [7; 16] };
    let open = |options: ArenaFile| options.open(|_, _| ControlFlow::Continue(()));
    let make_copy = || {
        fs::copy(&file.0, &copy.0).unwrap();
        assert_eq!(pins(&copy.0), Vec::<PathBuf>::new());
    };
    // The server of the original runs all the time.
    let _used = open(file.options()).unwrap().assign(holder).unwrap();
    let pinned = pins(&file.0);
    assert_eq!(pinned.len(), 1);
    make_copy();
    let refused = open(copy.options()).unwrap_err().advice(&Reader::Server);
    assert!(refused.contains("is a copy") && refused.contains("--fresh"), "{refused}");
    assert_eq!(Listed::of(&copy.0).unwrap().bytes, PAGE_BYTES as u64);
    Listed::drop_file(&copy.0).unwrap();
    assert_eq!(pins(&file.0), pinned, "the memory stays");
    make_copy();
    drop(open(ArenaFile { is_fresh: true, ..copy.options() }).unwrap().assign(holder).unwrap());
    assert_eq!((pins(&file.0), pins(&copy.0).len()), (pinned, 1), "it has memory of its own");
}

#[test]
fn a_window_that_the_kernel_refuses_stays_reserved() {
    require_root();
    let id = *b"it ends too soon";
    // The map ends long before the range does.
    let map = map::create(&id, 4 * PAGE_BYTES).expect("room for a map");
    map::remove(&id).expect("it has a name");
    let descriptor = || map.try_clone().expect("a descriptor");
    let windows = Windows::new(descriptor(), &(0..32 << 20), descriptor()).expect("addresses");
    let mapper = windows.mapper();
    let mut steps = 0;
    mapper.map_all(|| {
        steps += 1;
        ControlFlow::Continue(())
    });
    assert_eq!(steps, 1, "it gives up at the first window");
    assert!(mapper.is_all_reserved(), "another mapping may take the addresses");
}

#[test]
fn what_a_killed_server_left_is_dropped_with_the_file() {
    require_root();
    let file = File::new("direct-lent");
    let kept = file.options().open(|_, _| ControlFlow::Continue(())).unwrap();
    let generation = ArenaGeneration::new(5).expect("small");
    let reserved =
        kept.assign(Holder { node: SERVER, generation, token: [7; 16] }).expect("it is new");
    let lent = Lent::new(reserved.direct.as_ref().unwrap()).unwrap();
    std::mem::forget(lent);
    assert_eq!(pins(&file.0).len(), 3);
    // The next one begins as if there were none.
    drop(Lent::new(reserved.direct.as_ref().unwrap()).unwrap());
    assert_eq!(pins(&file.0).len(), 1);
    std::mem::forget(Lent::new(reserved.direct.as_ref().unwrap()).unwrap());
    let left = pins(&file.0);
    drop(reserved);
    Listed::drop_file(&file.0).unwrap();
    assert!(left.len() == 3 && left.iter().all(|pin| !pin.exists()), "{left:?}");
}

/// The pins of a file's arena; of another file, none.
fn pins(file: &Path) -> Vec<PathBuf> {
    let Some(id) = bluebridge_bpf::fs::arena_id(file).ok().flatten() else { return Vec::new() };
    let lent = bluebridge_bpf::fs::lent_arena_pins(&id);
    let pins = std::iter::once(bluebridge_bpf::fs::arena_pin(&id)).chain(lent);
    pins.filter(|pin| pin.exists()).collect()
}
