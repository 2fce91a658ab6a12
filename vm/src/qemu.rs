//! The command line of qemu, and the files through which a machine gets its command.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    image,
    machine::{Link, Machine},
};

/// `no_timer_check`: on a busy host the kernel may find its timer missing. `tsc=unstable`: two emulated time stamp
/// counters run at different speeds.
const KERNEL_LINE: &str = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr no_timer_check \
                           tsc=unstable clocksource=acpi_pm";

/// For each device of virtio: without the old interface, which takes longer to find.
const MODERN: &str = "disable-legacy=on";

/// Exit codes of qemu that the scripts in the machine choose: 2 v + 1 for the byte v that they write to the port.
pub(crate) const ENDED: i32 = 2 * 0o52 + 1;
/// The machine could not prepare its root.
pub(crate) const NOT_PREPARED: i32 = 2 * 0o41 + 1;

/// The files of one machine during a run.
pub(crate) struct Place {
    /// Its number, from 1.
    pub(crate) number: usize,
    /// The number of machines.
    pub(crate) count: usize,
    directory: PathBuf,
    lab: PathBuf,
}

impl Place {
    /// Makes the files of the machine with this number below the directory of a run.
    pub(crate) fn make(
        run: &Path,
        number: usize,
        count: usize,
        machine: &Machine,
    ) -> io::Result<Self> {
        let (directory, lab) = (run.join(number.to_string()), run.join("lab"));
        let place = Self { number, count, directory, lab };
        fs::create_dir_all(&place.lab)?;
        fs::create_dir_all(place.own(""))?;
        image::write(&machine.installed, &place.file("initramfs"))?;
        fs::write(place.own("command"), script(&machine.command))?;
        fs::write(place.own("environment"), place.environment(machine)?)?;
        fs::write(place.own("directory"), machine.directory.as_os_str().as_bytes())?;
        let shares = machine.shares.iter().enumerate().map(|(index, share)| {
            let access = if share.writable { "rw" } else { "ro" };
            format!("share{index} {access} {}\n", share.guest)
        });
        fs::write(place.own("shares"), shares.collect::<String>())?;
        let network = (!machine.links.is_empty()).then_some("virtio_net");
        let disks = (!machine.disks.is_empty()).then_some("virtio_blk");
        let modules = network.into_iter().chain(disks);
        let modules = modules.chain(machine.modules.iter().map(String::as_str));
        fs::write(
            place.own("modules"),
            modules.map(|name| format!("{name}\n")).collect::<String>(),
        )?;
        Ok(place)
    }

    /// A file that the machine does not see.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A file of the folder that the machine shares with the runner.
    pub(crate) fn own(&self, name: &str) -> PathBuf {
        self.directory.join("own").join(name)
    }

    fn environment(&self, machine: &Machine) -> io::Result<Vec<u8>> {
        let own = [("VM", self.number), ("VMS", self.count)];
        let own = own.map(|(name, value)| (name.to_owned(), OsString::from(value.to_string())));
        let mut text = Vec::new();
        for (name, value) in own.iter().chain(&machine.environment) {
            let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            if name.is_empty() || !name.bytes().all(is_name) {
                let text = format!("`{name}` is no name of a variable");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            text.extend_from_slice(format!("export {name}=").as_bytes());
            quote(value, &mut text);
            text.push(b'\n');
        }
        Ok(text)
    }

    /// qemu for this machine.
    pub(crate) fn qemu(&self, machine: &Machine) -> Command {
        let tools = &machine.installed.tools;
        let mut qemu = Command::new(tools.join("usr/bin/qemu-system-x86_64"));
        qemu.env_clear().env("LD_LIBRARY_PATH", tools.join("usr/lib/x86_64-linux-gnu"));
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            qemu.arg("-L").arg(tools.join(firmware));
        }
        // The translated code needs at most 128 MB; without a limit qemu takes twice the memory.
        qemu.args(["-M", "pc", "-accel", "tcg,tb-size=128", "-cpu", "max", "-smp", "1"]);
        qemu.arg("-m").arg(machine.memory_mib.to_string());
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        qemu.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        qemu.arg("-serial").arg(option("file:", &self.file("console"), ""));
        qemu.arg("-kernel").arg(&machine.installed.image);
        qemu.arg("-initrd").arg(self.file("initramfs"));
        qemu.args(["-append", KERNEL_LINE]);
        let (tools, modules) = (&machine.installed.tools, &machine.installed.modules);
        // Tools and modules are devices of their own: parts of the first would overlap with it.
        for (tag, directory) in [("host", Path::new("/")), ("tools", tools), ("kernel", modules)] {
            share(&mut qemu, tag, directory, false);
        }
        if machine.has_verbs {
            share(&mut qemu, "verbs", &machine.installed.verbs, false);
        }
        share(&mut qemu, "own", &self.own(""), true);
        share(&mut qemu, "lab", &self.lab, true);
        for (index, shared) in machine.shares.iter().enumerate() {
            share(&mut qemu, &format!("share{index}"), &shared.host, shared.writable);
        }
        for (index, file) in machine.disks.iter().enumerate() {
            let rest = format!(",format=raw,if=none,id=disk{index}");
            qemu.arg("-drive").arg(option("file=", file, &rest));
            qemu.arg("-device").arg(format!("virtio-blk-pci,{MODERN},drive=disk{index}"));
        }
        for (index, link) in machine.links.iter().enumerate() {
            qemu.arg("-netdev").arg(netdev(index, link));
            let mac = format!("02:bb:00:00:{:02x}:{:02x}", self.number, index);
            let rest = format!("netdev=net{index},mac={mac},host_mtu=9000,romfile=");
            qemu.arg("-device").arg(format!("virtio-net-pci,{MODERN},{rest}"));
        }
        qemu
    }
}

fn netdev(index: usize, link: &Link) -> OsString {
    match link {
        Link::Socket { own, peer } => {
            let start = format!("dgram,id=net{index},local.type=unix,local.path=");
            let mut text = option(&start, own, ",remote.type=unix,remote.path=");
            text.push(option("", peer, ""));
            text
        }
        Link::Tap { interface } => {
            format!("tap,id=net{index},ifname={interface},script=no,downscript=no").into()
        }
    }
}

fn share(qemu: &mut Command, tag: &str, directory: &Path, writable: bool) {
    // `none` like `passthrough`, but an ordinary user's failure to give a file away is no error.
    let access = if writable { "" } else { ",readonly=on" };
    let rest = format!(",security_model=none,multidevs=remap{access}");
    qemu.arg("-fsdev").arg(option(&format!("local,id={tag},path="), directory, &rest));
    qemu.arg("-device").arg(format!("virtio-9p-pci,{MODERN},fsdev={tag},mount_tag={tag}"));
}

/// An option of qemu with a path, in which a comma would begin the next setting.
fn option(before: &str, path: &Path, after: &str) -> OsString {
    let mut text = before.as_bytes().to_vec();
    for byte in path.as_os_str().as_bytes() {
        text.push(*byte);
        if *byte == b',' {
            text.push(b',');
        }
    }
    text.extend_from_slice(after.as_bytes());
    OsString::from_vec(text)
}

/// A shell script that executes a command.
fn script(command: &[OsString]) -> Vec<u8> {
    let mut text = b"exec".to_vec();
    for word in command {
        text.push(b' ');
        quote(word, &mut text);
    }
    text.push(b'\n');
    text
}

fn quote(word: &OsStr, into: &mut Vec<u8>) {
    into.push(b'\'');
    for byte in word.as_bytes() {
        match byte {
            b'\'' => into.extend_from_slice(b"'\\''"),
            other => into.push(*other),
        }
    }
    into.push(b'\'');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_command_unchanged() {
        let words = ["printf", "%s|", "it's", "a  b", "$HOME `x` \"y\" \\", "", "line\nline"];
        let text = script(&words.map(OsString::from));
        let scratch = tempfile::tempdir().expect("made");
        let file = scratch.path().join("script");
        fs::write(&file, text).expect("written");
        let output = Command::new("sh").arg(&file).output().expect("sh runs");
        let said = String::from_utf8(output.stdout).expect("text");
        assert_eq!(said, format!("{}|", words[2..].join("|")));
    }

    #[test]
    fn a_comma_in_a_path_is_doubled() {
        assert_eq!(option("file=", Path::new("/a,b"), ",if=none"), "file=/a,,b,if=none");
    }
}
