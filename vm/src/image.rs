//! The initramfs: a shell, the modules for the root's file systems, and the script that mounts it.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

use cpio::newc::{self, ModeFileType};

use crate::cache::Installed;

/// Modules without which there is no root: files of the host, and memory above them.
pub(crate) const EARLY: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];

const INIT: &str = include_str!("init.sh");
const GUEST: &str = include_str!("guest.sh");
const BARRIER: &str = include_str!("barrier.sh");

/// Writes the initramfs of a machine.
pub(crate) fn write(installed: &Installed, to: &Path) -> io::Result<()> {
    let mut archive = Archive { out: BufWriter::new(File::create(to)?), count: 0 };
    for directory in ["bin", "modules", "dev", "proc", "sys"] {
        archive.add(directory, ModeFileType::Directory, 0o755, &[])?;
    }
    let busybox = fs::read(installed.tools.join("usr/bin/busybox"))?;
    archive.add("bin/busybox", ModeFileType::Regular, 0o755, &busybox)?;
    for module in &installed.early {
        let name = module.file_name().unwrap_or_default().to_string_lossy();
        let bytes = fs::read(module)?;
        archive.add(&format!("modules/{name}"), ModeFileType::Regular, 0o644, &bytes)?;
    }
    for (name, script) in [("init", INIT), ("guest", GUEST), ("barrier", BARRIER)] {
        archive.add(name, ModeFileType::Regular, 0o755, script.as_bytes())?;
    }
    newc::trailer(archive.out)?.flush()
}

struct Archive {
    out: BufWriter<File>,
    count: u32,
}

impl Archive {
    fn add(&mut self, name: &str, kind: ModeFileType, mode: u32, data: &[u8]) -> io::Result<()> {
        // The kernel would take files of the same number for one file.
        self.count += 1;
        let size = u32::try_from(data.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let entry = newc::Builder::new(name).ino(self.count).mode(mode).set_mode_file_type(kind);
        let mut writer = entry.write(&mut self.out, size);
        writer.write_all(data)?;
        writer.finish().map(drop)
    }
}

/// The files of modules and of all that they need, in an order in which they can be loaded.
///
/// `index` is a kernel's `modules.dep`: `FILE: NEEDED ..`, where what a needed file itself needs comes after it.
/// A module that is not in it is part of the kernel.
pub(crate) fn load_order<'a>(index: &'a str, wanted: &[&str]) -> Vec<&'a str> {
    let mut order: Vec<&str> = Vec::new();
    for module in wanted {
        let line = index.lines().filter_map(|line| line.split_once(':'));
        let Some((file, needs)) = line.into_iter().find(|(file, _)| name_of(file) == *module)
        else {
            continue;
        };
        let needs: Vec<_> = needs.split_whitespace().collect();
        for next in needs.into_iter().rev().chain([file]) {
            if !order.contains(&next) {
                order.push(next);
            }
        }
    }
    order
}

fn name_of(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    // The kernel does not distinguish the two characters in names of modules.
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_after_what_they_need() {
        let index = "kernel/a/virtio-pci.ko.xz: kernel/b/modern.ko.xz kernel/b/virtio.ko.xz\n\
                     kernel/b/modern.ko.xz: kernel/b/virtio.ko.xz\n\
                     kernel/b/virtio.ko.xz:\nkernel/c/9p.ko: kernel/b/virtio.ko.xz\n";
        assert_eq!(
            load_order(index, &["virtio_pci", "built_in", "9p"]),
            [
                "kernel/b/virtio.ko.xz",
                "kernel/b/modern.ko.xz",
                "kernel/a/virtio-pci.ko.xz",
                "kernel/c/9p.ko"
            ]
        );
    }
}
