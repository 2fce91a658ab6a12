//! The unpacked packages below the target directory.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::{
    image,
    kernel::{self, Packing},
    machine::Kernel,
    packages::{Apt, PackageError, files},
    program::{self, POLL, ProgramError},
};

/// Changed when an unpacked cache of an earlier version must be made again.
const RECIPE: &str = "2";
/// Written last: a directory without it is half finished.
const MARKER: &str = "complete";
const IMAGE: &str = "kernel";
/// How long another process may take to fetch the same packages.
const LOCK_DEADLINE: Duration = Duration::from_secs(900);
/// How long it may take to index a kernel's modules, or to decompress one.
const PREPARE_DEADLINE: Duration = Duration::from_secs(120);
/// Modules for devices that no machine has: three quarters of a kernel's bytes.
const UNUSED_MODULES: [&str; 7] = [
    "sound",
    "drivers/gpu",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "drivers/scsi",
    "drivers/usb",
];

/// Why the cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The packages could not be fetched.
    #[error(transparent)]
    Packages(#[from] PackageError),
    /// Nothing has been fetched.
    #[error(
        "virtual machines with Linux {kernel} are not set up in {}: \
         run `cargo xtask vm --kernel {kernel} -- true` once, which fetches them",
        .directory.display()
    )]
    Incomplete {
        /// The kernel.
        kernel: Kernel,
        /// The cache.
        directory: PathBuf,
    },
    /// Another process fetches.
    #[error("another process has been fetching into {} for {} s; wait for it or stop it",
        .0.display(), LOCK_DEADLINE.as_secs())]
    Locked(PathBuf),
}

/// A directory with what machines need.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

/// A complete set of what one kernel's machines need.
#[derive(Clone, Debug)]
pub struct Installed {
    /// qemu and the other tools, unpacked.
    pub(crate) tools: PathBuf,
    /// The library for RDMA, unpacked; only for machines that ask for it.
    pub(crate) verbs: PathBuf,
    /// The kernel's modules, unpacked.
    pub(crate) modules: PathBuf,
    /// The kernel, decompressed if set-up knows how.
    pub(crate) image: PathBuf,
    /// Modules that the initramfs loads, in this order.
    pub(crate) early: Vec<PathBuf>,
}

impl Cache {
    /// The cache in a directory, which need not exist yet.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// The cache of the target directory in which the calling test or program was built.
    ///
    /// # Errors
    /// If the program does not know its own file.
    pub fn of_this_build() -> io::Result<Self> {
        let own = std::env::current_exe()?;
        // target/PROFILE/PROGRAM or target/PROFILE/deps/TEST
        let is_profile = |path: &&Path| path.file_name().is_some_and(|name| name != "deps");
        let profile = own.ancestors().skip(1).find(is_profile).unwrap_or(&own);
        Ok(Self::new(profile.parent().unwrap_or(profile).join("vm")))
    }

    /// What is there for a kernel.
    ///
    /// # Errors
    /// If it was not fetched, or not completely; nothing is fetched.
    pub fn installed(&self, kernel: Kernel) -> Result<Installed, CacheError> {
        let (tools, of_kernel) = (self.directory.join("tools"), self.kernel_directory(kernel));
        let verbs = self.directory.join("verbs");
        let incomplete = || CacheError::Incomplete { kernel, directory: self.directory.clone() };
        if ![&tools, &verbs, &of_kernel].into_iter().all(|set| is_complete(set)) {
            return Err(incomplete());
        }
        let listed = fs::read_dir(of_kernel.join("early")).map_err(|_| incomplete())?;
        let mut early: Vec<_> = listed.flatten().map(|entry| entry.path()).collect();
        early.sort();
        Ok(Installed {
            tools: tools.join("root"),
            verbs: verbs.join("root"),
            modules: of_kernel.join("root"),
            image: of_kernel.join(IMAGE),
            early,
        })
    }

    /// Like [`Self::installed`], and fetches what is missing; `report` gets a line about each step.
    ///
    /// # Errors
    /// If something can neither be found here nor fetched.
    pub fn install(&self, kernel: Kernel, report: impl Fn(&str)) -> Result<Installed, CacheError> {
        if let Ok(installed) = self.installed(kernel) {
            return Ok(installed);
        }
        fs::create_dir_all(&self.directory).map_err(files(self.making()))?;
        let _lock = self.lock()?;
        let tools = self.directory.join("tools");
        if !is_complete(&tools) {
            report("fetching qemu and its libraries for virtual machines (once; 25 MB)");
            self.make(&tools, |apt, root| {
                apt.tools(root)?;
                merge_into_usr(root)
            })?;
        }
        let verbs = self.directory.join("verbs");
        if !is_complete(&verbs) {
            report("fetching the library for RDMA for virtual machines (once; 1 MB)");
            self.make(&verbs, |apt, root| {
                apt.verbs(root)?;
                merge_into_usr(root)
            })?;
        }
        let of_kernel = self.kernel_directory(kernel);
        if !is_complete(&of_kernel) {
            report(&format!("fetching Linux {kernel} for virtual machines (once; 70 to 110 MB)"));
            let tools = Tools { root: tools.join("root") };
            self.make(&of_kernel, |apt, root| {
                apt.kernel(kernel, root)?;
                merge_into_usr(root)?;
                prepare_kernel(&of_kernel, root, &tools, apt)
            })?;
        }
        self.installed(kernel)
    }

    fn kernel_directory(&self, kernel: Kernel) -> PathBuf {
        self.directory.join(format!("linux-{kernel}"))
    }

    fn making(&self) -> String {
        format!("make {}", self.directory.display())
    }

    /// Fills `directory/root`, and marks the directory as complete at the end.
    fn make(
        &self,
        directory: &Path,
        fill: impl FnOnce(&mut Fetch, &Path) -> Result<(), PackageError>,
    ) -> Result<(), PackageError> {
        remove(directory)?;
        let scratch = self.directory.join("scratch");
        remove(&scratch)?;
        let root = directory.join("root");
        for made in [&root, &scratch] {
            fs::create_dir_all(made).map_err(files(format!("make {}", made.display())))?;
        }
        let mut apt = Fetch { apt: Apt::new(&scratch)?, scratch: scratch.clone() };
        fill(&mut apt, &root)?;
        remove(&scratch)?;
        fs::write(directory.join(MARKER), RECIPE).map_err(files("mark the cache as complete"))
    }

    fn lock(&self) -> Result<File, CacheError> {
        let path = self.directory.join("lock");
        let failed = |error| files(format!("lock {}", path.display()))(error);
        let file = File::create(&path).map_err(failed)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(failed(error).into()),
                Err(TryLockError::WouldBlock) if start.elapsed() > LOCK_DEADLINE => {
                    return Err(CacheError::Locked(self.directory.clone()));
                }
                Err(TryLockError::WouldBlock) => thread::sleep(POLL),
            }
        }
    }
}

/// apt, and a directory for what programs print.
struct Fetch {
    apt: Apt,
    scratch: PathBuf,
}

impl Fetch {
    fn tools(&mut self, into: &Path) -> Result<(), PackageError> {
        self.apt.tools(into)
    }

    fn verbs(&mut self, into: &Path) -> Result<(), PackageError> {
        self.apt.verbs(into)
    }

    fn kernel(&mut self, kernel: Kernel, into: &Path) -> Result<(), PackageError> {
        self.apt.kernel(kernel, into)
    }
}

fn is_complete(directory: &Path) -> bool {
    fs::read(directory.join(MARKER)).is_ok_and(|recipe| recipe == RECIPE.as_bytes())
}

fn remove(directory: &Path) -> Result<(), PackageError> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(files(format!("remove {}", directory.display()))(error))
        }
        _ => Ok(()),
    }
}

/// Moves `bin`, `lib` and the like into `usr`: above the host's root they would hide its links of these names.
fn merge_into_usr(root: &Path) -> Result<(), PackageError> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        let from = root.join(name);
        if from.is_dir() {
            let failed = files(format!("move {}", from.display()));
            move_into(&from, &root.join("usr").join(name)).map_err(failed)?;
        }
    }
    Ok(())
}

fn move_into(from: &Path, to: &Path) -> io::Result<()> {
    if !to.is_dir() {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        return fs::rename(from, to);
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            move_into(&entry.path(), &target)?;
        } else {
            fs::rename(entry.path(), target)?;
        }
    }
    fs::remove_dir(from)
}

/// The unpacked tools, as programs of the host.
struct Tools {
    root: PathBuf,
}

impl Tools {
    fn run(
        &self,
        program: &str,
        name: &str,
        scratch: &Path,
        arguments: &[&Path],
    ) -> Result<String, ProgramError> {
        let mut command = Command::new(self.root.join("usr/bin").join(program));
        command.arg0(name).args(arguments);
        command.env("LD_LIBRARY_PATH", self.root.join("usr/lib/x86_64-linux-gnu"));
        program::output(command, PREPARE_DEADLINE, scratch)
    }
}

/// Indexes a kernel's modules and copies those of the initramfs, decompressed and in the order of loading.
fn prepare_kernel(
    directory: &Path,
    root: &Path,
    tools: &Tools,
    fetch: &Fetch,
) -> Result<(), PackageError> {
    let versions = root.join("usr/lib/modules");
    let found = fs::read_dir(&versions).map_err(files("find the kernel's modules"))?;
    let Some(version) = found.flatten().next().map(|entry| entry.file_name()) else {
        return Err(files("find the kernel's modules")(io::ErrorKind::NotFound.into()));
    };
    let modules = versions.join(&version);
    for unused in UNUSED_MODULES {
        remove(&modules.join("kernel").join(unused))?;
    }
    // depmod takes a directory that contains lib/modules.
    tools.run(
        "kmod",
        "depmod",
        &fetch.scratch,
        &[Path::new("-b"), &root.join("usr"), Path::new(&version)],
    )?;
    let mut name = std::ffi::OsString::from("vmlinuz-");
    name.push(&version);
    let image = fs::read(root.join("boot").join(name)).map_err(files("find the kernel's image"))?;
    write_kernel(&image, directory, tools, fetch)?;
    remove(&root.join("boot"))?;
    let early = directory.join("early");
    fs::create_dir(&early).map_err(files("make a directory for modules"))?;
    let index = fs::read_to_string(modules.join("modules.dep"))
        .map_err(files("read the index of modules"))?;
    for (number, module) in image::load_order(&index, &image::EARLY).iter().enumerate() {
        let from = modules.join(module);
        let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let to = early.join(format!("{number:02}-{}", name.trim_end_matches(".xz")));
        fs::copy(&from, early.join(format!("{number:02}-{name}")))
            .map_err(files(format!("copy {}", from.display())))?;
        if name.ends_with(".xz") {
            let packed = early.join(format!("{number:02}-{name}"));
            tools.run("busybox", "unxz", &fetch.scratch, &[&packed])?;
            debug_assert!(to.is_file(), "unxz replaces the file");
        }
    }
    Ok(())
}

/// Writes the kernel of an image, decompressed if it is known how.
fn write_kernel(
    image: &[u8],
    directory: &Path,
    tools: &Tools,
    fetch: &Fetch,
) -> Result<(), PackageError> {
    let kernel = directory.join(IMAGE);
    let Some((packing, payload)) = kernel::packed(image) else {
        return fs::write(kernel, image).map_err(files("write the kernel's image"));
    };
    let (program, name, suffix, option) = match packing {
        // Not busybox's, which lacks the filter for programs of x86.
        Packing::Xz => ("xz", "unxz", "xz", None),
        Packing::Zstd => ("zstd", "unzstd", "zst", Some(Path::new("--rm"))),
    };
    let packed = kernel.with_extension(suffix);
    fs::write(&packed, payload).map_err(files("write the compressed kernel"))?;
    let arguments: Vec<_> = option.into_iter().chain([packed.as_path()]).collect();
    tools.run(program, name, &fetch.scratch, &arguments)?;
    let mut start = [0; kernel::ELF.len()];
    File::open(&kernel)
        .and_then(|mut file| file.read_exact(&mut start))
        .map_err(files("read the decompressed kernel"))?;
    if start != kernel::ELF {
        return Err(files("find a program in the decompressed kernel")(
            io::ErrorKind::InvalidData.into(),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_marked_directory_is_complete() {
        let scratch = tempfile::tempdir().expect("made");
        let cache = Cache::new(scratch.path());
        let made = |name: &str| {
            fs::create_dir_all(scratch.path().join(name).join("early")).expect("made");
        };
        made("tools");
        made("verbs");
        made("linux-6.1");
        let error = cache.installed(Kernel::V6_1).expect_err("nothing is marked");
        assert!(error.to_string().contains("cargo xtask vm --kernel 6.1"), "{error}");
        for name in ["tools", "verbs", "linux-6.1"] {
            fs::write(scratch.path().join(name).join(MARKER), RECIPE).expect("written");
        }
        assert!(cache.installed(Kernel::V6_1).is_ok());
        assert!(cache.installed(Kernel::V6_12).is_err(), "of the other kernel there is nothing");
        fs::write(scratch.path().join("tools").join(MARKER), "0").expect("written");
        assert!(cache.installed(Kernel::V6_1).is_err(), "an old recipe is made again");
    }

    #[test]
    fn what_would_hide_the_host_moves_into_usr() {
        let scratch = tempfile::tempdir().expect("made");
        let root = scratch.path();
        for directory in ["bin", "lib/a/b", "usr/lib/a", "etc"] {
            fs::create_dir_all(root.join(directory)).expect("made");
        }
        for file in ["bin/x", "lib/a/b/y", "usr/lib/a/z", "etc/c"] {
            fs::write(root.join(file), file).expect("written");
        }
        merge_into_usr(root).expect("moved");
        for file in ["usr/bin/x", "usr/lib/a/b/y", "usr/lib/a/z", "etc/c"] {
            assert!(root.join(file).is_file(), "{file}");
        }
        assert!(!root.join("bin").exists() && !root.join("lib").exists());
    }
}
