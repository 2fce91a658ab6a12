//! System calls on pages that are not local.

use std::io::{Read, Seek, Write};

use bluebridge_pager::FaultScope;

use super::*;

/// A region of 1 MiB, of which 64 KiB are local, all bytes set; its first page has left.
fn filled(rack: &(LocalRack, Vec<MemoryNode>), mode: FaultMode) -> RemoteRegion {
    let mut region =
        region(rack, &RegionOptions::new(1 << 20, 64 << 10).mode(mode)).expect("a region");
    region.as_mut_slice().fill(5);
    region
}

#[test]
fn pinned_pages_are_usable_by_system_calls() {
    let rack = servers(1);
    for mode in MODES {
        let mut region = filled(&rack, mode);
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&region.pin(10..3 * PAGE).expect("it is little")).expect("it is local");
        region.pin_mut(0..PAGE).expect("it is little").fill(6);
        file.rewind().expect("it is a file");
        file.read_exact(&mut region.pin_mut(PAGE + 1..4 * PAGE - 9).expect("it is little"))
            .expect("it is local");
        assert!(region.as_slice()[..PAGE].iter().all(|byte| *byte == 6));
        assert!(region.as_slice()[PAGE..].iter().all(|byte| *byte == 5));
        for _ in 0..3 {
            // Dropped pins do not count.
            drop(region.pin(0..8 * PAGE).expect("half of the local pages"));
        }
        let result = region.pin(0..9 * PAGE).map(|_| ());
        assert!(matches!(result, Err(Error::TooManyPins { pages: 9, limit: 8 })), "{result:?}");
        let result = region.pin(1 << 20..(1 << 20) + 1).map(|_| ());
        assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
        assert!(region.pin(4096..4096).expect("nothing").is_empty());
    }
}

#[test]
fn pages_that_are_not_local_are_usable_if_the_system_permits() {
    let rack = servers(1);
    for mode in MODES {
        let region = filled(&rack, mode);
        let mut file = tempfile::tempfile().expect("a file");
        let result = file.write(&region.as_slice()[..PAGE]);
        match region.mechanisms().scope {
            FaultScope::UserAndKernel => assert_eq!(result.expect("it is filled"), PAGE),
            FaultScope::UserOnly => {
                let error = result.expect_err("the page is missing");
                assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
            }
        }
        assert_eq!(region.as_slice()[0], 5, "the program itself can use it");
    }
}
